"""The plain cut: that of a publisher without a grain."""

import itertools
from collections.abc import Iterable, Iterator

from plait.cut.document import Cut
from plait.cut.frame import ITEM_SIZES, FrameSpec, Segment, items_max
from plait.layout import Layout, words_per_item


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
