"""Whether frames fit a layout: all their segments at once, as columns of a table."""

import numpy as np
from numpy.typing import NDArray

from plait.coverage import word_twice
from plait.cut.frame import FrameSpec
from plait.errors import DocumentInvalid
from plait.layout import Layout


def check_fit(frames: tuple[FrameSpec, ...], layout: Layout) -> None:
    """Proves that every frame reads whole items of its size, and each word at most once.

    Raises:
        DocumentInvalid: naming the first segment that doesn't, or the word.
    """
    if frames:
        table = _SegmentTable(frames)
        _check_tensors(table, layout)
        _check_disjoint(table)


class _SegmentTable:
    """All segments of a cut as int64 columns, one row a segment."""

    def __init__(self, frames: tuple[FrameSpec, ...]) -> None:
        self.frames = frames
        rows = [
            (number, frame.item_bytes, s.first_word, s.run, s.stride, s.repeats)
            for number, frame in enumerate(frames)
            for s in frame.segments
        ]
        table = np.array(rows, np.int64).T
        self.frame, self.item_bytes, self.first, self.run, self.stride, self.repeats = table
        self.item_words = np.maximum(self.item_bytes // 2, 1)
        self.run_words = self.run * self.item_words
        self.end = self.first + (self.repeats - 1) * self.stride + self.run_words

    def refuse(self, broken: NDArray[np.bool_], why: str) -> None:
        if broken.any():
            row = int(np.flatnonzero(broken)[0])
            segment = [int(c[row]) for c in (self.first, self.run, self.stride, self.repeats)]
            raise DocumentInvalid(f"frame {self.frame[row]}: segment {segment} {why}")


def _check_tensors(table: _SegmentTable, layout: Layout) -> None:
    """Every run holds whole items of tensors of its size; many runs stay in one tensor."""
    table.refuse(table.end > layout.total_words, f"ends beyond word {layout.total_words}")
    held = [
        (s, t.item_bytes) for t, s in zip(layout.tensors, layout.starts, strict=False) if t.words
    ]
    starts, sizes = np.array(held, np.int64).T
    first = np.searchsorted(starts, table.first, side="right") - 1
    last = np.searchsorted(starts, table.end - 1, side="right") - 1
    # Adjacent tensors of one item size share a group number.
    group = np.cumsum(np.diff(sizes, prepend=sizes[:1]) != 0)
    table.refuse(sizes[first] != table.item_bytes, "reads a tensor of another item size")
    table.refuse(group[first] != group[last], "crosses into a tensor of another item size")
    table.refuse((first != last) & (table.repeats > 1), "strides across tensors")
    odd = (table.first - starts[first]) % table.item_words != 0
    odd |= (table.repeats > 1) & (table.stride % table.item_words != 0)
    table.refuse(odd, "cuts through an item")


def _check_disjoint(table: _SegmentTable) -> None:
    """No word occurs twice."""
    word = word_twice(table.first, table.stride, table.repeats, table.run_words)
    if word is not None:
        raise DocumentInvalid(f"word {word} occurs in two runs of the cut")
