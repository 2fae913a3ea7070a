"""Frames: the items of some affine segments of words, numbered in the order of these."""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from plait.errors import DocumentInvalid, LimitExceeded
from plait.layout import words_per_item
from plait.limits import (
    DENSE_FRAME_BYTES_MAX,
    FRAME_ELEMENTS_MAX,
    SEGMENTS_PER_FRAME_MAX,
    WORDS_MAX,
)

ITEM_SIZES: Final = (1, 2, 4, 8)

Words = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """`repeats` runs of `run` items; their first words lie `stride` words apart.

    Attributes:
        first_word: canonical index of the first run's first word.
        run: consecutive items of one run, at least one.
        stride: words from one run's start to the next one's; without meaning for one run.
        repeats: number of runs, at least one.
    """

    first_word: int
    run: int
    stride: int
    repeats: int

    @property
    def items(self) -> int:
        return self.run * self.repeats

    def words(self, item_words: int) -> Words:
        """First words of its items, in order: int64 [items], each item being `item_words` long."""
        starts = self.first_word + np.arange(self.repeats, dtype=np.int64) * self.stride
        return (starts[:, None] + np.arange(self.run, dtype=np.int64) * item_words).reshape(-1)


@dataclass(frozen=True)
class FrameSpec:
    """The items of one frame, numbered from 0 through its segments as they are listed.

    Attributes:
        item_bytes: 1, 2, 4 or 8, of every item.
        segments: at least one.

    Raises:
        DocumentInvalid: an item size, a segment or an order that no frame can have.
        LimitExceeded: more items, segments or words than limits.py allows.
    """

    item_bytes: int
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if self.item_bytes not in ITEM_SIZES:
            raise DocumentInvalid(f"items of {self.item_bytes} bytes; expected 1, 2, 4 or 8")
        if not 0 < len(self.segments) <= SEGMENTS_PER_FRAME_MAX:
            raise LimitExceeded(
                f"frame of {len(self.segments)} segments; expected 1 to {SEGMENTS_PER_FRAME_MAX}"
            )
        for segment in self.segments:
            _check_segment(segment, words_per_item(self.item_bytes))
        if self.items > items_max(self.item_bytes):
            raise LimitExceeded(
                f"frame of {self.items} items of {self.item_bytes} bytes; "
                f"at most {items_max(self.item_bytes)}"
            )

    @cached_property
    def items(self) -> int:
        return sum(segment.items for segment in self.segments)

    @property
    def nbytes(self) -> int:
        return self.items * self.item_bytes

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Number of each segment's first item, and the frame's items last."""
        return tuple(itertools.accumulate((s.items for s in self.segments), initial=0))

    @cached_property
    def _columns(self) -> tuple[Words, Words, Words, Words]:
        """First word, run, stride and offset of every segment."""
        rows = [(s.first_word, s.run, s.stride) for s in self.segments]
        first, run, stride = np.array(rows, np.int64).T
        return first, run, stride, np.array(self.offsets[:-1], np.int64)

    def words_of(self, positions: NDArray[np.uint32]) -> Words:
        """First words of the items at these frame-local positions.

        Args:
            positions: 1-d uint32, each below `items`; any order.
        Returns:
            int64 of the same length.
        """
        first, run, stride, offsets = self._columns
        index = np.searchsorted(offsets, positions, side="right") - 1
        number, item = np.divmod(positions - offsets[index], run[index])
        words = first[index] + number * stride[index] + item * words_per_item(self.item_bytes)
        return np.asarray(words, np.int64)


def items_max(item_bytes: int, *, dense: bool = False) -> int:
    """Most items of a frame. Frames that are decoded whole are bounded in bytes."""
    if dense or item_bytes > 2:
        return DENSE_FRAME_BYTES_MAX // item_bytes
    return FRAME_ELEMENTS_MAX


def _check_segment(segment: Segment, words: int) -> None:
    if segment.first_word < 0 or segment.stride < 0 or segment.run < 1 or segment.repeats < 1:
        raise DocumentInvalid(f"impossible segment: {segment}")
    if segment.repeats > 1 and segment.stride < segment.run * words:
        raise DocumentInvalid(f"the runs of a segment overlap: {segment}")
    end = segment.first_word + (segment.repeats - 1) * segment.stride + segment.run * words
    if end > WORDS_MAX or segment.stride > WORDS_MAX:
        raise LimitExceeded(f"a segment ends at word {end}; at most {WORDS_MAX}: {segment}")
