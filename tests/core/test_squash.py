"""Stored deltas add up without weights: the sum does what they do one after the other."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait import codec
from plait.codec import chunks
from plait.cut import Cut, FrameSpec, Segment, plain_cut
from plait.errors import (
    BaseMismatch,
    ChunkInvalid,
    DocumentInvalid,
    FormatError,
    LayoutChanged,
    UsageError,
)
from plait.grain import SlottedCut, grain_cut
from plait.layout import Layout, TensorSpec
from plait.manifest import ChunkEntry, Manifest, Statistics
from plait.squash import Direction, Squash, Step, added_up, frames_of, increment_of
from plait.weights import ArrayWeights, fingerprint_weights
from tests.core.strategies import (
    changed_weights,
    copy_of,
    covering_cuts,
    densities,
    equal_bits,
    layouts,
    random_weights,
    seeds,
)
from tests.core.test_grain import KV_HEADS, decoder


@dataclass
class Stored:
    """A stored delta, and which of its chunks were read."""

    manifest: Manifest
    cut: Cut
    chunks: dict[str, codec.Chunk]
    read: list[str] = field(default_factory=list)

    def open(self, entry: ChunkEntry) -> codec.ChunkReader:
        self.read.append(entry.digest)
        return codec.read_chunk(self.chunks[entry.digest].data, entry=entry)

    def step(self, direction: Direction = "forward") -> Step:
        return Step(self.manifest, self.cut, self.open, direction)


def stored(cut: SlottedCut, old: ArrayWeights, new: ArrayWeights) -> Stored:
    deltas = codec.detect_frames(cut.cut.frames, old, new)
    frames = list(enumerate(zip(cut.cut.frames, deltas, strict=True)))
    chunks = list(
        codec.pack_chunks((codec.encode_delta(n, f, d) for n, (f, d) in frames), cut.slots)
    )
    layout = old.layout
    manifest = Manifest(
        kind="delta", layout=layout.digest, cut=cut.cut.digest if chunks else None,
        base=fingerprint_weights(old), target=fingerprint_weights(new),
        chunks=tuple(chunk.entry for chunk in chunks),
        statistics=Statistics(
            sum(d.count for d in deltas), sum(d.count * d.item_bytes for d in deltas),
            layout.total_elements, layout.dense_bytes, sum(chunk.size for chunk in chunks),
        ),
    )  # fmt: skip
    return Stored(manifest, cut.cut, {chunk.digest: chunk for chunk in chunks})


def squashed(steps: Sequence[Step], cut: Cut) -> Stored:
    total = Squash(steps)
    chunks = {chunk.digest: chunk for chunk in total.chunks()}
    return Stored(total.manifest(), cut, chunks)


def follow(weights: ArrayWeights, delta: Stored) -> None:
    assert fingerprint_weights(weights) == delta.manifest.base
    for entry in delta.manifest.chunks:
        for encoded in delta.open(entry).frames:
            frame = delta.cut.frames[encoded.number]
            change = codec.decode_delta(encoded, frame)
            assert codec.increment_on(frame, weights, change) == change.increment
            codec.apply(frame, weights, change)
    assert fingerprint_weights(weights) == delta.manifest.target


def slotted(data: st.DataObject, layout: Layout) -> SlottedCut:
    if layout.total_words and data.draw(st.booleans()):
        return grain_cut(layout, grain=data.draw(st.sampled_from([1, 2, 4])), for_anchor=False)
    cut = data.draw(covering_cuts(layout))
    return SlottedCut(cut, tuple(data.draw(st.integers(0, 3)) for _ in cut.frames))


@settings(deadline=None)
@given(st.data(), layouts(), seeds, densities)
def test_a_squash_leads_where_its_steps_lead_one_by_one(
    data: st.DataObject, layout: Layout, seed: int, density: float
) -> None:
    cut = slotted(data, layout)
    states = [random_weights(layout, seed)]
    for number in range(data.draw(st.integers(1, 4))):
        states.append(changed_weights(states[-1], seed + number + 1, density))
    line = [stored(cut, *pair) for pair in itertools.pairwise(states)]
    total = squashed([delta.step() for delta in line], cut.cut)
    held = copy_of(states[0])
    follow(held, total)
    assert equal_bits(held, states[-1])
    direct = stored(cut, states[0], states[-1])
    assert total.manifest.statistics == direct.manifest.statistics
    assert {c.increment for c in total.manifest.chunks} == {
        c.increment for c in direct.manifest.chunks
    }
    back = squashed([delta.step("reverse") for delta in line[::-1]], cut.cut)
    follow(held, back)
    assert equal_bits(held, states[0])


@settings(deadline=None)
@given(st.data(), layouts(), seeds, densities)
def test_a_delta_and_its_reverse_squash_to_nothing(
    data: st.DataObject, layout: Layout, seed: int, density: float
) -> None:
    cut = slotted(data, layout)
    old = random_weights(layout, seed)
    delta = stored(cut, old, changed_weights(old, seed + 1, density))
    nothing = squashed([delta.step(), delta.step("reverse")], cut.cut)
    assert nothing.manifest.chunks == ()
    assert nothing.manifest.cut is None
    assert nothing.manifest.base == nothing.manifest.target


@settings(deadline=None)
@given(st.data(), layouts(), seeds)
def test_squashing_is_associative(data: st.DataObject, layout: Layout, seed: int) -> None:
    cut = slotted(data, layout)
    states = [random_weights(layout, seed)]
    states += [changed_weights(states[0], seed + n, 0.3) for n in (1, 2, 3)]
    a, b, c = (stored(cut, *pair).step() for pair in itertools.pairwise(states))
    left = squashed([squashed([a, b], cut.cut).step(), c], cut.cut)
    right = squashed([a, squashed([b, c], cut.cut).step()], cut.cut)
    assert left.manifest == right.manifest == squashed([a, b, c], cut.cut).manifest


def part_of(cut: SlottedCut, slots: set[int]) -> SlottedCut:
    """The cut of a publisher that holds these slots only."""
    held = [(f, s) for f, s in zip(cut.cut.frames, cut.slots, strict=True) if s in slots]
    return SlottedCut(
        Cut(cut.cut.layout_digest, tuple(f for f, _ in held)), tuple(s for _, s in held)
    )


@settings(deadline=None, max_examples=20)
@given(seeds, densities)
def test_splits_into_shards_and_frames_commute_with_adding(seed: int, density: float) -> None:
    layout = decoder()
    old = random_weights(layout, seed)
    middle, new = (changed_weights(old, seed + n, density) for n in (1, 2))
    cuts = [
        grain_cut(layout, grain=1, for_anchor=False),
        grain_cut(layout, grain=8, for_anchor=False, kv_heads=KV_HEADS),
    ]
    sums = []
    for cut in cuts:
        first = [codec.detect(frame, old, middle) for frame in cut.cut.frames]
        second = [codec.detect(frame, middle, new) for frame in cut.cut.frames]
        held: dict[int, int] = {}
        for frame, a, b in zip(cut.cut.frames, first, second, strict=True):
            total = codec.add(a, b)
            words = frame.words_of(total.positions)
            held |= dict(zip(words.tolist(), total.differences.tolist(), strict=True))
        sums.append(held)
    assert sums[0] == sums[1]
    whole = codec.detect_frames(cuts[1].cut.frames, old, new)
    for slot in range(9):
        shard = part_of(cuts[1], {slot})
        mine = codec.detect_frames(shard.cut.frames, old, new)
        wanted = [d for d, s in zip(whole, cuts[1].slots, strict=True) if s == slot]
        for one, other in zip(mine, wanted, strict=True):
            assert np.array_equal(one.positions, other.positions)
            assert one.increment == other.increment


def line_of_two() -> tuple[SlottedCut, list[Stored], list[ArrayWeights]]:
    layout = decoder()
    cut = grain_cut(layout, for_anchor=False, kv_heads=KV_HEADS)
    states = [random_weights(layout, 1)]
    states += [changed_weights(states[0], n, 0.3) for n in (2, 3)]
    return cut, [stored(cut, *pair) for pair in itertools.pairwise(states)], states


def test_each_chunk_is_read_once_and_slots_stay() -> None:
    cut, line, _ = line_of_two()
    total = squashed([delta.step() for delta in line], cut.cut)
    for delta in line:
        assert sorted(delta.read) == sorted(delta.chunks)
    for chunk in total.manifest.chunks:
        assert {cut.slots[number] for number in chunk.frames} == {chunk.slot}
    slots = frames_of([line[0].step()])
    assert list(slots) == sorted(slots, key=lambda number: (cut.slots[number], number))


def states_of_frames(*values: list[int]) -> tuple[SlottedCut, list[ArrayWeights]]:
    """States of one tensor, one frame and one item each, over a cut of one slot."""
    layout = Layout.of([TensorSpec("w", "BF16", (len(values[0]),))])
    frames = tuple(FrameSpec(2, (Segment(word, 1, 0, 1),)) for word in range(len(values[0])))
    cut = SlottedCut(Cut(layout.digest, frames), (0,) * len(frames))
    return cut, [ArrayWeights(layout, {"w": np.array(v, np.uint16)}) for v in values]


def test_each_chunk_is_read_once_where_steps_touch_frames_by_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES_AIM", 8)  # some frames a chunk
    size = 60
    cut, states = states_of_frames(
        [0] * size, [n % 2 for n in range(size)], [9] * size, [9 - n % 3 for n in range(size)]
    )
    line = [stored(cut, *pair) for pair in itertools.pairwise(states)]
    assert min(len(delta.chunks) for delta in line) > 5
    steps = [delta.step() for delta in line]
    held = copy_of(states[0])
    for number, total in added_up(cut.cut, steps, frames_of(steps)):
        codec.apply(cut.cut.frames[number], held, total)
    assert equal_bits(held, states[-1])
    for delta in line:
        assert sorted(delta.read) == sorted(delta.chunks)


def test_steps_that_put_one_frame_in_two_slots_are_refused_before_a_chunk_is_read() -> None:
    cut, (old, middle, new) = states_of_frames([0, 0], [1, 1], [2, 2])
    first = stored(cut, old, middle)
    second = stored(replace(cut, slots=(0, 1)), middle, new)
    total = Squash([first.step(), second.step()])
    with pytest.raises(DocumentInvalid, match=r"frame 1 is in slot 0 and, .* in slot 1"):
        next(total.chunks())
    assert not first.read + second.read


def test_over_different_cuts_only_the_increment_survives() -> None:
    _, (first, _), (_, middle, new) = line_of_two()
    layout = middle.layout
    other = grain_cut(layout, grain=1, for_anchor=False)
    steps = [first.step(), stored(other, middle, new).step()]
    with pytest.raises(UsageError, match="different cuts"):
        Squash(steps)
    assert first.manifest.base is not None
    assert first.manifest.base + increment_of(steps) == fingerprint_weights(new)
    back = [replace(step, direction="reverse") for step in steps[::-1]]
    assert increment_of(back) == -increment_of(steps)


def test_what_is_no_chain_is_refused() -> None:
    cut, (first, second), (old, _, _) = line_of_two()
    with pytest.raises(UsageError, match="no deltas"):
        Squash([])
    with pytest.raises(BaseMismatch, match="reaches"):
        Squash([second.step(), first.step()])
    with pytest.raises(BaseMismatch):
        Squash([first.step(), second.step("reverse")])
    anchor = Manifest(
        kind="anchor", layout=old.layout.digest, cut=None, base=None,
        target=fingerprint_weights(old), chunks=(), external=True,
        statistics=first.manifest.statistics.__class__(0, 0, 0, 0, 0),
    )  # fmt: skip
    with pytest.raises(UsageError, match="anchor"):
        Squash([Step(anchor, None, first.open), first.step()])
    foreign = decoder(dtype="F16")
    weights = random_weights(foreign, 1)
    other = stored(grain_cut(foreign, for_anchor=False), weights, weights)
    with pytest.raises(LayoutChanged):
        Squash([first.step(), other.step()])
    with pytest.raises(UsageError, match="take all"):
        Squash([first.step()]).manifest()
    del cut


def test_a_frame_that_the_cut_doesn_t_have_is_refused() -> None:
    cut, (old, new) = states_of_frames([0, 0], [1, 1])
    delta = stored(cut, old, new)
    short = Cut(cut.cut.layout_digest, cut.cut.frames[:1])
    step = replace(delta.step(), cut=short)
    with pytest.raises(ChunkInvalid, match="frame 1 of a cut of 1 frames"):
        list(added_up(short, [step], frames_of([step])))


def test_chunks_whose_cut_isn_t_at_hand_don_t_add_up() -> None:
    cut, (old, new) = states_of_frames([0, 0], [1, 1])
    with pytest.raises(UsageError, match="different cuts"):
        Squash([replace(stored(cut, old, new).step(), cut=None)])


def test_an_anchors_frame_among_the_deltas_is_refused() -> None:
    layout = decoder()
    weights = random_weights(layout, 5)
    cut = plain_cut(layout, for_anchor=True)
    frames = [codec.encode_dense(n, frame, weights) for n, frame in enumerate(cut.frames)]
    (chunk,) = codec.pack_chunks(frames)
    target = chunk.increment
    manifest = Manifest(
        kind="delta", layout=layout.digest, cut=cut.digest, base=target - chunk.increment,
        target=target, chunks=(chunk.entry,), statistics=Statistics(0, 0, 0, 0, chunk.size),
    )  # fmt: skip
    delta = Stored(manifest, cut, {chunk.digest: chunk})
    with pytest.raises(ChunkInvalid, match="mode"):
        list(Squash([delta.step()]).chunks())
    short = Cut(cut.layout_digest, cut.frames[:0] or (FrameSpec(2, cut.frames[0].segments),))
    late = replace(chunk.entry, frames=(4,))
    lying = Stored(replace(manifest, chunks=(late,)), short, {chunk.digest: chunk})
    with pytest.raises(FormatError):
        list(Squash([lying.step()]).chunks())
