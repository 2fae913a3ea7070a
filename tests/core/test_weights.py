"""Weights as bits, whatever arrays they come in."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from plait import codec
from plait.cut import FrameSpec, Segment, plain_cut
from plait.errors import LayoutChanged, UsageError
from plait.fingerprint import ZERO, Fingerprint, fingerprint_at
from plait.layout import Layout, TensorSpec
from plait.weights import (
    ArrayWeights,
    fingerprint_items,
    fingerprint_weights,
    gather,
    scatter,
)
from tests.core.strategies import copy_of, covering_cuts, equal_bits, layouts, random_weights, seeds

GRID = Layout.of([TensorSpec("w", "BF16", (6, 8))])


def test_arrays_of_any_type_of_their_item_size_are_taken_as_bits() -> None:
    layout = Layout.of(
        [
            TensorSpec("c", "C64", (2,)),
            TensorSpec("f", "F32", (3, 2)),
            TensorSpec("h", "F16", ()),
            TensorSpec("m", "BOOL", (4,)),
            TensorSpec("p", "F4", (2, 8)),
        ]
    )
    arrays: dict[str, NDArray[Any]] = {
        "c": np.array([1 + 2j, -0.0], np.complex64),
        "f": np.array([[1, 2], [3, 4], [np.nan, -0.0]], np.float32),
        "h": np.array(1.5, np.float16),
        "m": np.array([True, False, True, True]),
        "p": np.arange(8, dtype=np.uint8),
    }
    weights = ArrayWeights(layout, arrays)
    assert weights.bits("c").dtype == np.uint64
    assert weights.bits("f").tolist()[-1] == 0x80000000
    assert weights.bits("h").tolist() == [0x3E00]
    assert weights.bits("m").tolist() == [1, 0, 1, 1]
    weights.bits("f")[0] = 0x7FC00001
    assert np.isnan(arrays["f"][0, 0])


def test_missing_unknown_or_reshaped_tensors_are_refused() -> None:
    array = np.zeros((6, 8), np.uint16)
    for arrays in (
        {},
        {"w": array, "v": array},
        {"w": array.T},
        {"w": array[:5]},
        {"w": array.astype(np.float32)},
        {"w": array.reshape(6, 8, 1)},
    ):
        with pytest.raises(LayoutChanged):
            ArrayWeights(GRID, arrays)
    ArrayWeights(GRID, {"w": array.reshape(-1)})
    packed = Layout.of([TensorSpec("p", "F4", (2, 8))])
    ArrayWeights(packed, {"p": np.zeros(8, np.uint8)})
    with pytest.raises(LayoutChanged, match=r"expected F4\[2, 8\]"):
        ArrayWeights(packed, {"p": np.zeros((2, 8), np.uint8)})


@pytest.mark.parametrize("dtype", [">u2", ">i2", ">f2", "<U1", "S2", "O", "<M8[s]", ">c8", "i1,i1"])
def test_what_isn_t_numbers_in_little_endian_is_refused(dtype: str) -> None:
    size = np.dtype(dtype).itemsize
    layout = Layout.of([TensorSpec("w", {2: "BF16", 4: "F32", 8: "C64"}[size], (4,))])
    with pytest.raises(LayoutChanged, match="'w' is"):
        ArrayWeights(layout, {"w": np.zeros(4, dtype)})


def test_items_that_numpy_has_no_name_for_are_taken_as_bits() -> None:
    bits = np.array([1, 0x7FC1], np.uint16)
    layout = Layout.of([TensorSpec("w", "BF16", (2,))])
    assert ArrayWeights(layout, {"w": bits.view("V2")}).bits("w").tolist() == bits.tolist()


@pytest.mark.parametrize("threads", [0, -1])
def test_a_pass_on_no_thread_is_refused(threads: int) -> None:
    weights = ArrayWeights(GRID, {"w": np.zeros(48, np.uint16)})
    with pytest.raises(UsageError, match="one at least"):
        fingerprint_weights(weights, threads=threads)


def strided_arrays() -> list[NDArray[np.uint16]]:
    """The same 6 by 8 items as a transposed, a reversed, a stepped and a padded view."""
    items = np.arange(48, dtype=np.uint16).reshape(6, 8)
    transposed = items.T.copy().T
    reversed_ = items[::-1].copy()[::-1]
    stepped = np.full((6, 16), 0xFFFF, np.uint16)
    stepped[:, ::2] = items
    padded = np.full((6, 11), 0xFFFF, np.uint16)
    padded[:, :8] = items
    return [transposed, reversed_, stepped[:, ::2], padded[:, :8]]


@pytest.mark.parametrize("array", strided_arrays(), ids=["transposed", "reversed", "step", "pad"])
def test_only_logical_items_count_and_no_write_gets_lost_in_a_copy(
    array: NDArray[np.uint16],
) -> None:
    plain = ArrayWeights(GRID, {"w": np.arange(48, dtype=np.uint16).reshape(6, 8)})
    strided = ArrayWeights(GRID, {"w": array})
    assert equal_bits(plain, strided)
    assert fingerprint_weights(plain) == fingerprint_weights(strided)
    (frame,) = plain_cut(GRID, for_anchor=False).frames
    assert codec.detect(frame, plain, strided).count == 0
    changed = copy_of(plain)
    changed.bits("w")[9] += 1
    delta = codec.detect(frame, strided, changed)
    assert delta.positions.tolist() == [9]
    with pytest.raises(UsageError, match="read-only"):
        codec.apply(frame, strided, delta)


@given(st.data(), layouts(), seeds)
def test_gathering_and_scattering_are_inverse(
    data: st.DataObject, layout: Layout, seed: int
) -> None:
    weights = random_weights(layout, seed)
    other = random_weights(layout, seed + 1)
    total = ZERO
    for frame in data.draw(covering_cuts(layout)).frames:
        items = gather(frame, weights)
        words = frame.words_of(np.arange(frame.items, dtype=np.uint32))
        assert fingerprint_items(frame, items) == fingerprint_at(words, items)
        total += fingerprint_items(frame, items)
        scatter(frame, other, items)
    assert equal_bits(other, weights)
    assert total == fingerprint_weights(weights, threads=3)


def test_a_column_block_is_gathered_row_by_row() -> None:
    weights = ArrayWeights(GRID, {"w": np.arange(48, dtype=np.uint16)})
    frame = FrameSpec(2, (Segment(2, 3, 8, 6), Segment(0, 1, 8, 2)))
    rows = [8 * r + c for r in range(6) for c in (2, 3, 4)]
    assert gather(frame, weights).tolist() == [*rows, 0, 8]


def test_items_of_another_frame_aren_t_scattered() -> None:
    weights = ArrayWeights(GRID, {"w": np.zeros(48, np.uint16)})
    (frame,) = plain_cut(GRID, for_anchor=False).frames
    for items in (np.ones(47, np.uint16), np.ones(48, np.uint32), np.ones((48, 1), np.uint16)):
        with pytest.raises(UsageError):
            scatter(frame, weights, items)
    assert not weights.bits("w").any()


def test_weights_without_words_have_the_fingerprint_zero() -> None:
    layout = Layout.of([TensorSpec("e", "BF16", (0, 16))])
    assert fingerprint_weights(ArrayWeights(layout, {"e": np.zeros((0, 16), np.uint16)})) == ZERO
    assert str(ZERO) == "0" * 32


def test_the_fingerprint_tells_apart_what_values_can_t() -> None:
    """Equal NaNs are equal, other payloads aren't, and -0.0 isn't 0.0."""
    layout = Layout.of([TensorSpec("x", "F32", (2,))])

    def of(*bits: int) -> Fingerprint:
        return fingerprint_weights(ArrayWeights(layout, {"x": np.array(bits, np.uint32)}))

    assert of(0x7FC00001, 0) == of(0x7FC00001, 0)
    assert of(0x7FC00001, 0) != of(0x7FC00002, 0)
    assert of(0x7FC00001, 0) != of(0x7FC00001, 1 << 31)


@pytest.mark.parametrize(("dtype", "item_bytes"), [("BF16", 2), ("F32", 4), ("F64", 8)])
def test_bits_may_begin_at_any_byte_of_a_mapped_file(dtype: str, item_bytes: int) -> None:
    layout = Layout.of([TensorSpec("w", dtype, (1000,))])
    aligned = random_weights(layout, 5)
    changed = aligned.bits("w").copy()
    changed[[3, 500, 999]] += np.array([1], changed.dtype)
    new = ArrayWeights(layout, {"w": changed})
    data = bytearray(b"!" + aligned.bits("w").tobytes())
    odd = ArrayWeights(layout, {"w": np.frombuffer(data, f"<u{item_bytes}", offset=1)})
    assert not odd.bits("w").flags.aligned
    assert fingerprint_weights(odd) == fingerprint_weights(aligned)
    (frame,) = plain_cut(layout, for_anchor=False).frames
    delta = codec.detect(frame, odd, new)
    assert delta.positions.tolist() == [3, 500, 999]
    assert codec.increment_on(frame, odd, delta) == delta.increment
    assert codec.encode_dense(0, frame, odd) == codec.encode_dense(0, frame, aligned)
    codec.apply(frame, odd, delta)
    assert equal_bits(odd, new)


def test_a_block_of_columns_is_fingerprinted_without_a_word_of_memory_for_each_item() -> None:
    frame = FrameSpec(2, (Segment(5, 64, 512, 1 << 13),))
    items = np.arange(frame.items).astype(np.uint16)
    fingerprint_items(frame, items)  # compiled
    tracemalloc.start()
    fingerprint_items(frame, items)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < items.nbytes / 8
