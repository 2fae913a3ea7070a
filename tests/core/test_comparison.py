"""Comparing a frame part by part, from wherever its bits are held."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from plait.codec import Comparison, detect
from plait.cut import FrameSpec, Segment
from plait.errors import UsageError
from plait.layout import Layout, TensorSpec, words_per_item
from plait.weights import UNSIGNED, ArrayWeights

DTYPES = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}
ITEMS = 700
FRAME = FrameSpec(2, (Segment(0, 10, 0, 1),))


@given(
    st.sampled_from(sorted(DTYPES)),
    st.sets(st.integers(1, ITEMS - 1), max_size=6),
    st.integers(0, 1 << 16),
    st.booleans(),
)
def test_any_division_into_runs_finds_what_one_pass_finds(
    item_bytes: int, cuts: set[int], seed: int, strided: bool
) -> None:
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, ITEMS * item_bytes, np.uint8).view(UNSIGNED[item_bytes])
    new = old.copy()
    new[random.random(ITEMS) < 0.1] ^= 1
    layout = Layout.of([TensorSpec("w", DTYPES[item_bytes], (ITEMS,))])
    frame = FrameSpec(item_bytes, (Segment(0, ITEMS, 0, 1),))
    expected = detect(frame, ArrayWeights(layout, {"w": old}), ArrayWeights(layout, {"w": new}))
    comparison = Comparison(frame)
    bounds = [0, *sorted(cuts), ITEMS]
    for start, end in itertools.pairwise(bounds):
        # Arrays that lie anyhow in memory are read by their logic.
        held = np.repeat(new[start:end], 3)[::3] if strided else new[start:end]
        comparison.add_run(
            old[start:end], held, first_word=start * words_per_item(item_bytes), offset=start
        )
    found = comparison.delta()
    np.testing.assert_array_equal(found.positions, expected.positions)
    np.testing.assert_array_equal(found.differences, expected.differences)
    assert found.increment == expected.increment


def test_a_run_of_no_items_changes_nothing() -> None:
    comparison, none = Comparison(FRAME), np.empty(0, np.uint16)
    zeros, ones = np.zeros(5, np.uint16), np.ones(5, np.uint16)
    comparison.add_run(none, none, first_word=0, offset=0)
    comparison.add_run(zeros, ones, first_word=2, offset=2)
    comparison.add_run(none, none, first_word=10, offset=10)
    assert comparison.delta().positions.tolist() == [2, 3, 4, 5, 6]
    assert Comparison(FRAME).delta().count == 0


@pytest.mark.parametrize(
    ("old", "new", "offset", "why"),
    [
        (np.zeros(3, np.uint16), np.zeros(4, np.uint16), 0, "of one length"),
        (np.zeros(3, np.uint16), np.zeros(3, np.uint32), 0, "expected uint16"),
        (np.zeros(3, np.int16), np.zeros(3, np.int16), 0, "expected uint16"),
        (np.zeros((3, 1), np.uint16), np.zeros((3, 1), np.uint16), 0, "of one length"),
        (np.zeros(3, np.uint16), np.zeros(3, np.uint16), 8, "items 8 to 11 of a frame of 10"),
        (np.zeros(3, np.uint16), np.zeros(3, np.uint16), 3, "behind item 4"),
    ],
)
def test_parts_that_the_frame_does_not_have_are_refused(
    old: NDArray[np.uint16], new: NDArray[np.uint16], offset: int, why: str
) -> None:
    comparison = Comparison(FRAME)
    comparison.add_run(np.zeros(4, np.uint16), np.zeros(4, np.uint16), first_word=0, offset=0)
    with pytest.raises(UsageError, match=why):
        comparison.add_run(old, new, first_word=0, offset=offset)
