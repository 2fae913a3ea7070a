"""The cut: how a layout is divided into frames, named by digest and shared by many manifests.

A frame is given by affine segments in the order of its items, so that a whole model, a flat shard,
a block of rows and a block of columns are all coded alike.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from plait import canonical
from plait.coverage import word_twice
from plait.errors import DocumentInvalid, LimitExceeded
from plait.layout import Layout, words_per_item
from plait.limits import (
    DENSE_FRAME_BYTES_MAX,
    FRAME_ELEMENTS_MAX,
    FRAMES_MAX,
    RUNS_PER_CUT_MAX,
    SEGMENTS_PER_FRAME_MAX,
    WORDS_MAX,
)

FORMAT: Final = "plait-cut/1"
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

    def words(self, item_words: int) -> "Words":
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


@dataclass(frozen=True)
class Cut:
    """Every frame of a layout, or of the part of it that is published.

    Raises:
        LimitExceeded: more frames or runs than limits.py allows.
    """

    layout_digest: str
    frames: tuple[FrameSpec, ...]

    def __post_init__(self) -> None:
        if len(self.frames) > FRAMES_MAX:
            raise LimitExceeded(f"cut of {len(self.frames)} frames; at most {FRAMES_MAX}")
        runs = sum(segment.repeats for frame in self.frames for segment in frame.segments)
        if runs > RUNS_PER_CUT_MAX:
            raise LimitExceeded(f"cut of {runs} runs; at most {RUNS_PER_CUT_MAX}")

    @cached_property
    def data(self) -> bytes:
        """Canonical bytes."""
        return canonical.serialize(self.to_document())

    @cached_property
    def digest(self) -> str:
        return canonical.digest_of(self.data)

    def serialize(self) -> bytes:
        return self.data

    def to_document(self) -> dict[str, Any]:
        frames = [
            [frame.item_bytes, [[s.first_word, s.run, s.stride, s.repeats] for s in frame.segments]]
            for frame in self.frames
        ]
        return {"format": FORMAT, "requires": [], "layout": self.layout_digest, "frames": frames}

    @classmethod
    def parse(cls, data: bytes | str) -> "Cut":
        """A cut from its canonical bytes. `check_against` proves that it fits a layout.

        Raises:
            DocumentInvalid, UnsupportedFormat, LimitExceeded: see those classes.
        """
        document = canonical.parse(data, expected_format=FORMAT)
        if set(document) != {"format", "requires", "layout", "frames"}:
            raise DocumentInvalid("a cut has the fields format, requires, layout, frames")
        if not canonical.is_digest(document["layout"]):
            raise DocumentInvalid(f"a cut's layout is a digest, got {document['layout']!r:.80}")
        if not isinstance(document["frames"], list):
            raise DocumentInvalid("a cut's frames are a list")
        canonical.check_length(document["frames"], FRAMES_MAX, "frames")
        return cls(document["layout"], tuple(map(_parse_frame, document["frames"])))

    def check_against(self, layout: Layout) -> None:
        """Proves that every frame reads whole items of its size, each word at most once.

        A segment of one run may cross adjacent tensors of one item size; one of more runs lies
        within one tensor.

        Raises:
            DocumentInvalid: it is another layout's cut, or breaks one of these rules.
        """
        if self.layout_digest != layout.digest:
            raise DocumentInvalid(
                f"the cut belongs to layout {self.layout_digest}, not to {layout.digest}"
            )
        if self.frames:
            table = _SegmentTable(self.frames)
            _check_tensors(table, layout)
            _check_disjoint(table)

    def covers(self, layout: Layout) -> bool:
        """Whether every word of the layout occurs exactly once, as an anchor needs.

        Raises:
            DocumentInvalid: as `check_against`.
        """
        self.check_against(layout)
        words = sum(frame.items * words_per_item(frame.item_bytes) for frame in self.frames)
        return words == layout.total_words


def items_max(item_bytes: int, *, dense: bool = False) -> int:
    """Most items of a frame. Frames that are decoded whole are bounded in bytes."""
    if dense or item_bytes > 2:
        return DENSE_FRAME_BYTES_MAX // item_bytes
    return FRAME_ELEMENTS_MAX


def plain_cut(layout: Layout, *, for_anchor: bool) -> Cut:
    """The cut of a publisher without a grain: all words, per item size, in name order.

    Args:
        for_anchor: frames small enough to be coded `dense`.
    """
    frames = itertools.chain.from_iterable(
        _plain_frames(_regions(layout, size), size, items_max(size, dense=for_anchor))
        for size in ITEM_SIZES
    )
    return Cut(layout.digest, tuple(frames))


def _regions(layout: Layout, item_bytes: int) -> Iterator[tuple[int, int]]:
    """Maximal (first word, items) of adjacent tensors of one item size."""
    first, end = 0, 0
    for tensor, start in zip(layout.tensors, layout.starts, strict=False):
        if tensor.item_bytes != item_bytes or not tensor.words:
            continue
        if start != end:
            if end > first:
                yield first, (end - first) // words_per_item(item_bytes)
            first = start
        end = start + tensor.words
    if end > first:
        yield first, (end - first) // words_per_item(item_bytes)


def _plain_frames(
    regions: Iterable[tuple[int, int]], item_bytes: int, most: int
) -> Iterator[FrameSpec]:
    segments: list[Segment] = []
    room = most
    for first, items in regions:
        done = 0
        while done < items:
            run = min(room, items - done)
            segments.append(Segment(first + done * words_per_item(item_bytes), run, 0, 1))
            done += run
            room -= run
            if not room:
                yield FrameSpec(item_bytes, tuple(segments))
                segments, room = [], most
    if segments:
        yield FrameSpec(item_bytes, tuple(segments))


def _parse_frame(row: object) -> FrameSpec:
    match row:
        case [int(item_bytes), list(segments)] if type(item_bytes) is int:
            canonical.check_length(segments, SEGMENTS_PER_FRAME_MAX, "segments of a frame")
            return FrameSpec(item_bytes, tuple(map(_parse_segment, segments)))
    raise DocumentInvalid(f"a cut's frame must be [item bytes, segments], got {str(row)[:120]}")


def _parse_segment(row: object) -> Segment:
    if not isinstance(row, list) or len(row) != 4 or any(type(number) is not int for number in row):
        raise DocumentInvalid(
            f"a segment must be [first word, run, stride, repeats], got {str(row)[:120]}"
        )
    return Segment(*row)


def _check_segment(segment: Segment, words: int) -> None:
    if segment.first_word < 0 or segment.stride < 0 or segment.run < 1 or segment.repeats < 1:
        raise DocumentInvalid(f"impossible segment: {segment}")
    if segment.repeats > 1 and segment.stride < segment.run * words:
        raise DocumentInvalid(f"the runs of a segment overlap: {segment}")
    end = segment.first_word + (segment.repeats - 1) * segment.stride + segment.run * words
    if end > WORDS_MAX or segment.stride > WORDS_MAX:
        raise LimitExceeded(f"a segment ends at word {end}; at most {WORDS_MAX}: {segment}")


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
