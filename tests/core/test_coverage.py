"""Whether runs overlap: equal to counting every word, in the memory that limits.py states."""

import tracemalloc
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait import canonical
from plait.coverage import word_twice
from plait.cut import Cut, FrameSpec, Segment
from plait.errors import DocumentInvalid, LimitExceeded
from plait.layout import Layout, TensorSpec
from plait.limits import DOCUMENT_VALUES_MAX

MIB = 1 << 20


@st.composite
def segments(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """First word, stride, repeats, words of a run; the runs of one don't overlap."""
    run = draw(st.integers(1, 5))
    stride = run + draw(st.integers(0, 6))
    return draw(st.integers(0, 80)), stride, draw(st.integers(1, 5)), run


@given(st.lists(segments(), max_size=5))
def test_a_word_that_occurs_twice_is_found_and_no_other(rows: list[tuple[int, ...]]) -> None:
    table = np.array(rows, np.int64).reshape(-1, 4).T
    words = Counter(
        first + number * stride + word
        for first, stride, repeats, run in rows
        for number in range(repeats)
        for word in range(run)
    )
    found = word_twice(*table)
    assert (found is not None) == any(count > 1 for count in words.values())
    assert found is None or words[found] > 1


def peak_of(call: Callable[[], object]) -> int:
    """Most bytes held at once within the call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_cut_of_very_many_runs_takes_what_is_stated() -> None:
    runs = 1 << 21
    layout = Layout.of([TensorSpec("x", "U8", (2 * runs,)), TensorSpec("y", "U8", (2 * runs,))])

    def checking(*rows: tuple[int, int, int, int]) -> Callable[[], None]:
        cut = Cut(layout.digest, tuple(FrameSpec(1, (Segment(*row),)) for row in rows))
        cut.check_against(layout)  # compiled
        return lambda: cut.check_against(layout)

    assert peak_of(checking((0, 1, 2, runs))) < MIB
    assert peak_of(checking((0, 1, 2, runs), (2 * runs, 1, 2, runs))) < MIB
    dealt = checking((0, 1, 2, runs), (1, 1, 2, runs))
    assert peak_of(dealt) < 2 * runs * 16 + MIB
    with pytest.raises(DocumentInvalid, match="word 4 occurs"):
        checking((0, 1, 2, runs), (1, 1, 3, runs // 2))


@pytest.mark.parametrize("value", [b"{}", b"[]", b"0", b'{"a":0}'])
def test_a_document_of_too_many_values_is_refused_before_they_are_built(value: bytes) -> None:
    text = b"[" + b",".join([value] * (DOCUMENT_VALUES_MAX + 1)) + b"]"
    canonical.read(b"[]")  # compiled

    def refused() -> None:
        with pytest.raises(LimitExceeded, match=r"values; at most 8388608|bytes; at most"):
            canonical.read(text)

    assert peak_of(refused) < MIB
