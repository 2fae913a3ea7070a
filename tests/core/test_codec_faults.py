"""Faults that others met: bit patterns, huge tensors, empty and 0-d ones; what a delta costs."""

import numpy as np
import pytest
from numpy.typing import NDArray

from plait import codec
from plait.codec import FrameDelta
from plait.cut import Cut, FrameSpec, Segment, plain_cut
from plait.errors import ChunkInvalid, LayoutChanged
from plait.fingerprint import ZERO, fingerprint_at
from plait.layout import Layout, TensorSpec
from plait.weights import ArrayWeights, fingerprint_weights
from tests.core.strategies import SPECIAL, copy_of, equal_bits


def through_the_codec(old: ArrayWeights, new: ArrayWeights) -> list[FrameDelta]:
    """Deltas of every changed frame as a follower reads them."""
    cut = plain_cut(old.layout, for_anchor=False)
    frames = enumerate(cut.frames)
    encoded = (codec.encode_delta(n, f, codec.detect(f, old, new)) for n, f in frames)
    held = copy_of(old)
    deltas = []
    for chunk in codec.pack_chunks(encoded):
        for stored in codec.read_chunk(chunk.data, entry=chunk.entry).frames:
            deltas.append(codec.decode_delta(stored, cut.frames[stored.number]))
            codec.apply(cut.frames[stored.number], held, deltas[-1])
    assert equal_bits(held, new)
    assert fingerprint_weights(held) == fingerprint_weights(new)
    return deltas


@pytest.mark.parametrize(
    ("dtype", "item_bytes"), [("F8_E5M2", 1), ("BF16", 2), ("F32", 4), ("F64", 8)]
)
def test_every_special_pattern_turns_into_every_other_bit_for_bit(
    dtype: str, item_bytes: int
) -> None:
    """NaNs keep their payloads, zeros their sign; no bit pattern means "unchanged"."""
    special = np.array(SPECIAL[item_bytes], f"u{item_bytes}")
    before = np.repeat(special, special.size)
    after = np.tile(special, special.size)
    layout = Layout.of([TensorSpec("w", dtype, (before.size,))])
    old, new = ArrayWeights(layout, {"w": before}), ArrayWeights(layout, {"w": after})
    (delta,) = through_the_codec(old, new)
    assert delta.count == int((before != after).sum())
    (frame,) = plain_cut(layout, for_anchor=False).frames
    assert codec.detect(frame, new, copy_of(new)).count == 0


def test_a_weight_becomes_nan_and_a_nan_becomes_a_weight() -> None:
    layout = Layout.of([TensorSpec("w", "BF16", (6,))])
    old = ArrayWeights(layout, {"w": np.array([0, 0, 0, 0x3F80, 0x7FC0, 0], np.uint16)})
    new = ArrayWeights(layout, {"w": np.array([0, 0, 0, 0x7FC0, 0x3F80, 0], np.uint16)})
    (delta,) = through_the_codec(old, new)
    assert delta.positions.tolist() == [3, 4]


def test_mixed_item_sizes_keep_their_own_bits() -> None:
    """An FP32 bias moves by 1e-6 beside BF16 weights: its difference is exact."""
    layout = Layout.of([TensorSpec("bias", "F32", (2,)), TensorSpec("w", "BF16", (64,))])
    bias = np.array([6.8170, 6.8171], np.float32)
    old = ArrayWeights(layout, {"bias": bias, "w": np.zeros(64, np.uint16)})
    moved = bias + np.array([0, 1e-6], np.float32)
    assert moved[1] != bias[1]
    new = ArrayWeights(layout, {"bias": moved, "w": np.zeros(64, np.uint16)})
    (delta,) = through_the_codec(old, new)
    assert (delta.item_bytes, delta.positions.tolist()) == (4, [1])


def test_positions_beyond_two_to_the_31_are_right() -> None:
    """Untouched zero pages take no memory, so the tensor is as large as it says."""
    items = (1 << 31) + 16
    layout = Layout.of([TensorSpec("w", "U8", (items,))])
    old = ArrayWeights(layout, {"w": np.zeros(items, np.uint8)})
    new = ArrayWeights(layout, {"w": np.zeros(items, np.uint8)})
    changed = [0, (1 << 31) - 1, 1 << 31, items - 1]
    new.bits("w")[changed] = [1, 2, 3, 255]
    cut = plain_cut(layout, for_anchor=False)
    words, stored = [], 0
    for number in (0, len(cut.frames) - 2, len(cut.frames) - 1):
        frame = cut.frames[number]
        delta = codec.detect(frame, old, new)
        encoded = codec.encode_delta(number, frame, delta)
        at = frame.words_of(codec.decode_delta(encoded, frame).positions)
        bits = new.bits("w")[at]
        before = fingerprint_at(at, np.zeros_like(bits))
        assert delta.increment == fingerprint_at(at, bits) - before
        codec.apply(frame, old, delta)
        words += at.tolist()
        stored += encoded.stored_size
    assert words == changed
    assert np.array_equal(old.bits("w")[changed], [1, 2, 3, 255])
    assert stored < 200_000


def test_a_tensor_of_three_billion_items_is_addressed_whole() -> None:
    items = 3 << 30
    layout = Layout.of([TensorSpec("w", "BF16", (3, 1 << 30))])
    at = 5 << 29
    frame = FrameSpec(2, (Segment(at - 10, 100, 0, 1),))
    Cut(layout.digest, (frame,)).check_against(layout)
    weights = ArrayWeights(layout, {"w": np.zeros(items, np.uint16)})
    delta = FrameDelta(2, np.array([10], np.uint32), np.array([7], np.uint16), ZERO)
    codec.apply(frame, weights, delta)
    assert weights.bits("w")[at] == 7
    assert frame.words_of(delta.positions).tolist() == [at]


def test_an_unchanged_version_has_no_chunks() -> None:
    layout = Layout.of([TensorSpec("w", "BF16", (3, 5))])
    weights = ArrayWeights(layout, {"w": np.arange(15, dtype=np.uint16)})
    assert through_the_codec(weights, copy_of(weights)) == []
    (frame,) = plain_cut(layout, for_anchor=False).frames
    nothing = codec.detect(frame, weights, weights)
    before = copy_of(weights)
    codec.apply(frame, weights, nothing)
    assert equal_bits(weights, before)
    assert codec.increment_on(frame, weights, nothing) == nothing.increment == ZERO
    with pytest.raises(ChunkInvalid):
        codec.decode_delta(codec.encode_delta(0, frame, nothing), frame)


def test_zero_size_and_scalar_tensors_are_ordinary() -> None:
    layout = Layout.of(
        [
            TensorSpec("empty", "BF16", (0, 16)),
            TensorSpec("experts", "BF16", (4, 2)),
            TensorSpec("none", "F32", (0,)),
            TensorSpec("one", "BF16", (1,)),
            TensorSpec("scale", "BF16", ()),
        ]
    )

    def weights(scale: int) -> ArrayWeights:
        return ArrayWeights(
            layout,
            {
                "empty": np.zeros((0, 16), np.uint16),
                "experts": np.zeros((4, 2), np.uint16),
                "none": np.zeros(0, np.float32),
                "one": np.zeros(1, np.uint16),
                "scale": np.array(scale, np.uint16),
            },
        )

    (delta,) = through_the_codec(weights(3), weights(4))
    assert (delta.positions.tolist(), delta.differences.tolist()) == ([9], [1])
    with pytest.raises(LayoutChanged, match="'scale' is BF16"):
        layout.require_equal(
            Layout.of([*layout.tensors[:-1], TensorSpec("scale", "BF16", (1,))]), what="test"
        )


def test_detecting_between_layouts_is_refused() -> None:
    first = Layout.of([TensorSpec("w", "BF16", (4,))])
    second = Layout.of([TensorSpec("w", "F16", (4,))])
    (frame,) = plain_cut(first, for_anchor=False).frames
    zeros = {"w": np.zeros(4, np.uint16)}
    with pytest.raises(LayoutChanged, match="F16"):
        codec.detect(frame, ArrayWeights(first, zeros), ArrayWeights(second, zeros))


def test_strided_views_of_positions_and_differences_are_read_by_their_logic() -> None:
    positions = np.array([1, 9, 3, 9, 5, 9], np.uint32)[::2]
    differences = np.array([30, 20, 10], np.uint16)[::-1]
    delta = FrameDelta(2, positions, differences, ZERO)
    layout = Layout.of([TensorSpec("w", "BF16", (8,))])
    weights = ArrayWeights(layout, {"w": np.zeros(8, np.uint16)})
    (frame,) = plain_cut(layout, for_anchor=False).frames
    codec.apply(frame, weights, codec.decode_delta(codec.encode_delta(0, frame, delta), frame))
    assert weights.bits("w").tolist() == [0, 10, 0, 20, 0, 30, 0, 0]


def test_a_delta_doesn_t_follow_the_arrays_it_was_detected_in() -> None:
    layout = Layout.of([TensorSpec("w", "BF16", (100,))])
    old = ArrayWeights(layout, {"w": np.zeros(100, np.uint16)})
    new = ArrayWeights(layout, {"w": np.ones(100, np.uint16)})
    (frame,) = plain_cut(layout, for_anchor=False).frames
    delta = codec.detect(frame, old, new)
    new.bits("w")[:] = 0xFFFF
    assert set(delta.differences.tolist()) == {1}


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def entropy_bits(counts: NDArray[np.int64]) -> float:
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def test_a_changed_element_costs_at_most_a_byte_and_a_quarter() -> None:
    """Masters with row and column scales, moved by AdamW-like steps: about 1 % of BF16 changes.

    The limit is the entropy of independent positions and differences.
    """
    shape = (8192, 2048)
    random = np.random.default_rng(20)
    masters = random.standard_normal(shape, np.float32) * np.float32(0.025)
    masters *= np.exp(0.25 * random.standard_normal((shape[0], 1), np.float32))
    masters *= np.exp(0.15 * random.standard_normal((1, shape[1]), np.float32))
    steps = np.clip(random.standard_normal(shape, np.float32) * np.float32(0.4), -1, 1)
    layout = Layout.of([TensorSpec("w", "BF16", shape)])
    old = ArrayWeights(layout, {"w": bfloat16(masters)})
    new = ArrayWeights(layout, {"w": bfloat16(masters - np.float32(7.5e-7) * steps)})
    (frame,) = plain_cut(layout, for_anchor=False).frames
    delta = codec.detect(frame, old, new)
    density = delta.count / frame.items
    assert 0.0095 < density < 0.0105
    (chunk,) = codec.pack_chunks([codec.encode_delta(0, frame, delta)])
    assert chunk.size / delta.count <= 1.25
    limit = entropy_bits(np.array([delta.count, frame.items - delta.count])) / density
    limit += entropy_bits(np.unique(delta.differences, return_counts=True)[1])
    assert 8 * chunk.size / delta.count <= 1.02 * limit
