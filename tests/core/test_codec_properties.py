"""Deltas form a group, and every way through the codec ends at the same bits."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plait import codec
from plait.cut import Cut, FrameSpec, Segment, plain_cut
from plait.fingerprint import ZERO, Fingerprint
from plait.layout import Layout, TensorSpec, words_per_item
from plait.weights import ArrayWeights, Weights, fingerprint_weights, scatter
from tests.core import reference, reference_documents
from tests.core.strategies import (
    changed_weights,
    copy_of,
    covering_cuts,
    densities,
    equal_bits,
    layouts,
    random_weights,
    seeds,
    words_of_state,
)


def publish(cut: Cut, old: Weights, new: Weights) -> list[codec.Chunk]:
    frames = enumerate(cut.frames)
    deltas = ((n, frame, codec.detect(frame, old, new)) for n, frame in frames)
    return list(codec.pack_chunks(codec.encode_delta(*delta) for delta in deltas))


def follow(cut: Cut, weights: Weights, chunks: list[codec.Chunk], *, back: bool = False) -> None:
    for chunk in chunks:
        for encoded in codec.read_chunk(chunk.data, entry=chunk.entry).frames:
            frame = cut.frames[encoded.number]
            delta = codec.decode_delta(encoded, frame)
            delta = codec.negate(delta) if back else delta
            assert codec.increment_on(frame, weights, delta) == delta.increment
            codec.apply(frame, weights, delta)


def same_delta(first: codec.FrameDelta, second: codec.FrameDelta) -> bool:
    return (
        np.array_equal(first.positions, second.positions)
        and np.array_equal(first.differences, second.differences)
        and first.increment == second.increment
    )


@given(st.data(), layouts(), seeds, densities)
def test_a_delta_leads_from_old_to_new_and_back_bit_for_bit(
    data: st.DataObject, layout: Layout, seed: int, density: float
) -> None:
    cut = data.draw(covering_cuts(layout))
    old = random_weights(layout, seed)
    new = changed_weights(old, seed + 1, density)
    chunks = publish(cut, old, new)
    held = copy_of(old)
    follow(cut, held, chunks)
    assert equal_bits(held, new)
    increment = sum((chunk.increment for chunk in chunks), ZERO)
    assert fingerprint_weights(old) + increment == fingerprint_weights(new)
    follow(cut, held, chunks, back=True)
    assert equal_bits(held, old)


@given(st.data(), layouts(), seeds)
def test_an_anchor_carries_every_bit_and_its_increments_are_the_fingerprint(
    data: st.DataObject, layout: Layout, seed: int
) -> None:
    cut = data.draw(covering_cuts(layout))
    assert cut.covers(layout)
    weights = random_weights(layout, seed)
    frames = (codec.encode_dense(n, frame, weights) for n, frame in enumerate(cut.frames))
    chunks = list(codec.pack_chunks(frames))
    held = random_weights(layout, seed + 1)
    for chunk in chunks:
        for encoded in codec.read_chunk(chunk.data, entry=chunk.entry).frames:
            frame = cut.frames[encoded.number]
            scatter(frame, held, codec.decode_dense(encoded, frame))
    assert equal_bits(held, weights)
    assert sum((chunk.increment for chunk in chunks), ZERO) == fingerprint_weights(weights)


@given(layouts(), seeds)
def test_the_fingerprint_is_the_formula_of_the_format(layout: Layout, seed: int) -> None:
    weights = random_weights(layout, seed)
    total = str(ZERO)
    for tensor in layout.tensors:
        part = reference.fingerprint(weights.bits(tensor.name), layout.start_of(tensor.name))
        total = reference.add_fingerprints(total, part)
    assert fingerprint_weights(weights) == Fingerprint.parse(total)


@given(st.data(), layouts(), seeds, densities, densities)
def test_adding_two_deltas_is_the_delta_of_both_steps(
    data: st.DataObject, layout: Layout, seed: int, first: float, second: float
) -> None:
    cut = data.draw(covering_cuts(layout))
    states = [random_weights(layout, seed)]
    states.append(changed_weights(states[0], seed + 1, first))
    states.append(changed_weights(states[1], seed + 2, second))
    for frame in cut.frames:
        steps = [codec.detect(frame, a, b) for a, b in itertools.pairwise(states)]
        both = codec.add(*steps)
        assert same_delta(both, codec.detect(frame, states[0], states[2]))
        assert same_delta(both, codec.add(*reversed(steps)))


@given(layouts(), seeds, densities)
def test_a_delta_and_its_negation_cancel(layout: Layout, seed: int, density: float) -> None:
    old = random_weights(layout, seed)
    new = changed_weights(old, seed + 1, density)
    for frame in plain_cut(layout, for_anchor=False).frames:
        delta = codec.detect(frame, old, new)
        assert same_delta(codec.negate(delta), codec.detect(frame, new, old))
        assert same_delta(codec.negate(codec.negate(delta)), delta)
        nothing = codec.add(delta, codec.negate(delta))
        assert (nothing.count, nothing.increment) == (0, ZERO)


@given(layouts(), seeds)
def test_adding_is_associative(layout: Layout, seed: int) -> None:
    states = [random_weights(layout, seed + i) for i in range(4)]
    for frame in plain_cut(layout, for_anchor=False).frames:
        a, b, c = (codec.detect(frame, s, t) for s, t in itertools.pairwise(states))
        left, right = codec.add(codec.add(a, b), c), codec.add(a, codec.add(b, c))
        assert same_delta(left, right)


@given(layouts(), seeds)
def test_another_base_under_a_touched_word_changes_the_increment(layout: Layout, seed: int) -> None:
    old = random_weights(layout, seed)
    new = changed_weights(old, seed + 1, 0.5)
    other = changed_weights(old, seed + 2, 0.5)
    before, after, elsewhere = (words_of_state(weights) for weights in (old, new, other))
    # Of a wide item, the other base may differ in words that the change leaves alone.
    touched = (before != after) & (before != elsewhere)
    for frame in plain_cut(layout, for_anchor=False).frames:
        delta = codec.detect(frame, old, new)
        first = frame.words_of(np.arange(frame.items, dtype=np.uint32))
        words = first[:, None] + np.arange(words_per_item(frame.item_bytes))
        same = codec.increment_on(frame, other, delta) == delta.increment
        assert same == (not touched[words].any())


@given(st.data(), layouts(), seeds)
def test_a_second_reader_written_from_the_text_decodes_the_same(
    data: st.DataObject, layout: Layout, seed: int
) -> None:
    cut = data.draw(covering_cuts(layout))
    old = random_weights(layout, seed)
    new = changed_weights(old, seed + 1, 0.4)
    rows = cut.to_document()["frames"]
    for chunk in publish(cut, old, new):
        for number, frame in reference.read_chunk(chunk.data).items():
            spec = cut.frames[number]
            delta = codec.detect(spec, old, new)
            read = reference.changes(frame, spec.item_bytes, spec.items)
            assert list(read) == delta.positions.tolist()
            assert list(read.values()) == delta.differences.tolist()
            words = reference_documents.words_of(*rows[number])
            assert [words[p] for p in read] == spec.words_of(delta.positions).tolist()


@given(st.data(), layouts(), seeds)
def test_a_second_reader_decodes_anchors(data: st.DataObject, layout: Layout, seed: int) -> None:
    cut = data.draw(covering_cuts(layout))
    weights = random_weights(layout, seed)
    for number, spec in enumerate(cut.frames):
        encoded = codec.encode_dense(number, spec, weights)
        (chunk,) = codec.pack_chunks([encoded])
        frame = reference.read_chunk(chunk.data)[number]
        items = codec.decode_dense(encoded, spec)
        assert reference.dense_items(frame, spec.item_bytes) == items.tolist()


@given(seeds, st.sampled_from(["BF16", "U8"]), st.sampled_from([1e-6, 1e-4, 0.01]))
@settings(max_examples=12)
def test_frames_with_restart_points_lead_to_the_same_bits(
    seed: int, dtype: str, density: float
) -> None:
    layout = Layout.of([TensorSpec("a", dtype, (5 << 19,)), TensorSpec("b", dtype, (1 << 19,))])
    random = np.random.default_rng(seed)
    arrays = {t.name: np.zeros(t.items, f"u{t.item_bytes}") for t in layout.tensors}
    old = ArrayWeights(layout, arrays)
    new = copy_of(old)
    for tensor in layout.tensors:
        bits = new.bits(tensor.name)
        at = random.integers(0, bits.size, int(bits.size * density) + 1)
        bits[at] = random.integers(0, 1 << 8 * bits.itemsize, at.size)
    cut = plain_cut(layout, for_anchor=False)
    chunks = publish(cut, old, new)
    held = copy_of(old)
    follow(cut, held, chunks)
    assert equal_bits(held, new)
    delta = codec.detect(cut.frames[0], old, new)
    for chunk in chunks:
        frame = reference.read_chunk(chunk.data)[0]
        read = reference.changes(frame, layout.tensors[0].item_bytes, 3 << 20)
        assert list(read) == delta.positions.tolist()


def test_the_same_frames_make_the_same_bytes() -> None:
    layout = Layout.of([TensorSpec("w", "BF16", (64, 64)), TensorSpec("x", "F32", (100,))])
    old = random_weights(layout, 1)
    new = changed_weights(old, 2, 0.1)
    cut = plain_cut(layout, for_anchor=False)
    first, second = publish(cut, old, new), publish(cut, old, copy_of(new))
    assert [chunk.data for chunk in first] == [chunk.data for chunk in second]


def test_threads_encode_and_decode_as_one_does() -> None:
    layout = Layout.of(TensorSpec(f"t{i}", "BF16", (30_000 + i,)) for i in range(16))
    old = random_weights(layout, 1)
    new = changed_weights(old, 2, 0.05)
    frames = [
        FrameSpec(2, (Segment(start, tensor.items, 0, 1),))
        for tensor, start in zip(layout.tensors, layout.starts, strict=False)
    ]

    def both_ways(number: int) -> tuple[codec.EncodedFrame, list[int]]:
        frame = frames[number]
        encoded = codec.encode_delta(number, frame, codec.detect(frame, old, new))
        return encoded, codec.decode_delta(encoded, frame).positions.tolist()

    with ThreadPoolExecutor(8) as pool:
        pooled = list(pool.map(both_ways, range(len(frames)), timeout=300))
    assert pooled == [both_ways(number) for number in range(len(frames))]


def test_every_item_may_change_by_every_difference() -> None:
    layout = Layout.of([TensorSpec("w", "BF16", (1 << 16,))])
    frame = FrameSpec(2, (Segment(0, 1 << 16, 0, 1),))
    old = ArrayWeights(layout, {"w": np.zeros(1 << 16, np.uint16)})
    new = ArrayWeights(layout, {"w": np.arange(1 << 16, dtype=np.uint16)})
    delta = codec.decode_delta(codec.encode_delta(0, frame, codec.detect(frame, old, new)), frame)
    assert delta.positions.tolist() == list(range(1, 1 << 16))
    assert delta.differences.tolist() == list(range(1, 1 << 16))
