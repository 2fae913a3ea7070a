"""What a sweep finds along a fuzzed cut, against a dense comparison through the cut's text."""

from typing import Any, Final
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from plait import codec
from plait.codec import FrameDelta, sweep
from plait.codec.sweep import Sweep, compare, join, parts_by_tensor
from plait.cut import Cut, FrameSpec
from plait.fingerprint import Fingerprint
from plait.grain import SlottedCut
from plait.layout import TensorSpec
from plait.weights import ArrayWeights, fingerprint_items, fingerprint_weights, scatter
from tests.core import reference, reference_documents
from tests.core.strategies import copy_of, words_of_state
from tests.fuzz.drawn import fresh_cut, fresh_layout, fresh_states, items_at
from tests.fuzz.material import Source

# Items read at once: borders in the middle of runs, between them, and none.
_BLOCKS: Final = (1 << 21, 5, 16, 64, 97)

State = NDArray[np.uint16]


def sweeps(data: bytes) -> None:
    """Sweeps along a cut, with a grain or without; through chunks, there and back; an anchor."""
    source = Source(data)
    layout = fresh_layout(source)
    slotted = fresh_cut(source, layout)
    old, new = fresh_states(source, layout)
    before, after = words_of_state(old), words_of_state(new)
    rows = slotted.cut.to_document()["frames"]
    truth = [dense_changes(size, segments, before, after) for size, segments in rows]
    for found in _found(source, slotted.cut, old, new):
        assert len(found) == len(truth)
        for delta, (positions, differences, increment) in zip(found, truth, strict=True):
            assert np.array_equal(delta.positions, positions), "other items than a dense comparison"
            assert np.array_equal(delta.differences, differences)
            assert str(delta.increment) == increment
    _there_and_back(slotted, found, old, new)
    _anchored(slotted.cut, old, new)


def dense_changes(
    item_bytes: int, segments: list[list[int]], before: State, after: State
) -> tuple[NDArray[np.int64], NDArray[Any], str]:
    """Positions, differences and increment of a frame, of all its items at once."""
    words = np.array(reference_documents.words_of(item_bytes, segments), np.int64)
    old, new = (items_at(state, words, item_bytes) for state in (before, after))
    positions = np.flatnonzero(old != new)
    touched = words[positions]
    width = max(item_bytes // 2, 1)
    every = (touched[:, None] + np.arange(width)).reshape(-1).astype(np.uint64)
    both = [
        reference.mixed_words(every, state[every].astype(np.uint64)) for state in (after, before)
    ]
    increment = reference.add_fingerprints(both[0], both[1], -1)
    return positions, (new - old)[positions], increment


def _found(
    source: Source, cut: Cut, old: ArrayWeights, new: ArrayWeights
) -> list[list[FrameDelta]]:
    """The deltas of all frames, as each way to sweep finds them."""
    frames, layout = cut.frames, old.layout

    def read(tensor: TensorSpec, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
        return old.bits(tensor.name)[start:stop], new.bits(tensor.name)[start:stop]

    with mock.patch.object(sweep, "_BLOCK", source.pick(_BLOCKS)):
        kept = Sweep(frames, layout)
        rounds = [d for numbers in kept.rounds for d in kept.detect(numbers, old, new)]
        again = [d for numbers in kept.rounds for d in kept.detect(numbers, old, new)]
        at_once = codec.detect_frames(frames, old, new)
        block = source.pick((None, *_BLOCKS))
        parts = [
            part
            for group in parts_by_tensor(frames, layout)
            for part in compare(group, read, block=block)
        ]
    alone = [codec.detect(frame, old, new) for frame in frames]
    return [alone, again, at_once, join(frames, parts), rounds]


def _there_and_back(
    slotted: SlottedCut, deltas: list[FrameDelta], old: ArrayWeights, new: ArrayWeights
) -> None:
    """Through chunks to the new bits, and by the negated deltas to the old ones."""
    frames = slotted.cut.frames
    live, wanted = copy_of(old), words_of_state(old)
    after = words_of_state(new)
    encoded = [codec.encode_delta(n, frames[n], delta) for n, delta in enumerate(deltas)]
    chunks = codec.pack_chunks(encoded, slotted.slots)
    stored = [frame for chunk in chunks for frame in codec.read_chunk(chunk.data).frames]
    assert [f.number for f in sorted(stored, key=lambda f: f.number)] == [
        n for n, delta in enumerate(deltas) if delta.count
    ]
    for frame in stored:
        spec = frames[frame.number]
        decoded = codec.decode_delta(frame, spec)
        assert np.array_equal(decoded.positions, deltas[frame.number].positions)
        assert np.array_equal(decoded.differences, deltas[frame.number].differences)
        assert codec.increment_on(spec, live, decoded) == frame.increment
        codec.apply(spec, live, decoded)
        words = _all_words(spec)
        wanted[words] = after[words]
    assert np.array_equal(words_of_state(live), wanted), "not the new bits"
    total = fingerprint_weights(live) - fingerprint_weights(old)
    assert sum((frame.increment for frame in stored), Fingerprint()) == total
    assert str(fingerprint_weights(live)) == reference.fingerprint(wanted)
    for frame in reversed(stored):
        back = codec.negate(codec.decode_delta(frame, frames[frame.number]))
        assert codec.increment_on(frames[frame.number], live, back) == -frame.increment
        codec.apply(frames[frame.number], live, back)
    assert np.array_equal(words_of_state(live), words_of_state(old)), "not the old bits"


def _anchored(cut: Cut, old: ArrayWeights, new: ArrayWeights) -> None:
    """The same frames coded whole: their items come out as they are, and go where they belong."""
    live, wanted, after = copy_of(old), words_of_state(old), words_of_state(new)
    for number, frame in enumerate(cut.frames):
        encoded = codec.encode_dense(number, frame, new)
        items = codec.decode_dense(encoded, frame)
        assert fingerprint_items(frame, items) == encoded.increment
        scatter(frame, live, items)
        words = _all_words(frame)
        assert np.array_equal(
            items, items_at(after, words[:: len(words) // items.size], items.itemsize)
        )
        assert str(encoded.increment) == reference.mixed_words(
            words.astype(np.uint64), after[words].astype(np.uint64)
        )
        wanted[words] = after[words]
    assert np.array_equal(words_of_state(live), wanted), "an anchor's frames say something else"


def _all_words(frame: FrameSpec) -> NDArray[np.int64]:
    first = frame.words_of(np.arange(frame.items, dtype=np.uint32))
    return (first[:, None] + np.arange(max(frame.item_bytes // 2, 1))).reshape(-1)
