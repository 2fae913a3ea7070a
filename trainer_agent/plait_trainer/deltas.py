"""Deltas of whole captures: frame deltas by their number in the cut, added up."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from plait.codec.algebra import FrameDelta, add, apply
from plait.codec.frames import EncodedFrame, encode_delta, encode_dense
from plait.cut import Cut
from plait.layout import Layout
from plait.manifest import Statistics
from plait.weights import Piece, Weights
from plait_trainer.share import Share

Deltas = Mapping[int, FrameDelta]


def add_up(first: Deltas, second: Deltas) -> Deltas:
    """One delta for two in a row, over one cut. Frames that changed back are left out."""
    if not first or not second:
        return first or second
    return sum_of((first, second))


def sum_of(parts: Iterable[Deltas]) -> Deltas:
    """One delta for many over one cut: in a row, or of different tensors. Numbers increase, and
    frames that changed back are left out."""
    total: dict[int, FrameDelta] = {}
    for part in parts:
        for number, delta in part.items():
            total[number] = add(total[number], delta) if number in total else delta
    return {number: total[number] for number in sorted(total) if total[number].count}


def apply_deltas(share: Share, weights: Weights, deltas: Deltas) -> None:
    """Adds deltas of a share's frames to weights of its local layout, in place.

    Raises:
        PlaitError: as `algebra.apply` does.
    """
    # Looked up, not walked through: a share has 10^5 frames, and a delta may be of one tensor.
    for number in sorted(deltas):
        place = bisect_left(share.numbers, number)
        if place < len(share.numbers) and share.numbers[place] == number:
            apply(share.local_frames[place], weights, deltas[number])


def changed_items(piece: Piece, delta: FrameDelta) -> tuple[NDArray[np.int64], slice]:
    """Which items of its tensor a piece's frame changes, and the rows of the delta that say so."""
    bounds = np.array([piece.frame_offset, piece.frame_offset + piece.items])
    first, end = map(int, np.searchsorted(delta.positions, bounds))
    places: NDArray[np.int64] = delta.positions[first:end].astype(np.int64)
    rows, columns = np.divmod(places - piece.frame_offset, piece.run)
    return piece.start_item + rows * piece.stride + columns, slice(first, end)


def encode_changes(cut: Cut, deltas: Deltas) -> Iterator[EncodedFrame]:
    """Encoded frames of a delta, numbers increasing."""
    for number in sorted(deltas):
        yield encode_delta(number, cut.frames[number], deltas[number])


def encode_whole(share: Share, weights: Weights) -> Iterator[EncodedFrame]:
    """Encoded frames of an anchor: every frame of a share.

    Args:
        weights: of the share's local layout.
    """
    for number, local in zip(share.numbers, share.local_frames, strict=True):
        placed = None if share.is_whole else share.cut.cut.frames[number]
        yield encode_dense(number, local, weights, placed=placed)


def statistics_of(layout: Layout, deltas: Deltas | None, chunk_bytes: int) -> Statistics:
    """What a manifest changes and costs; `deltas` is None for an anchor."""
    elements, size = layout.total_elements, layout.dense_bytes
    if deltas is not None:
        elements = sum(delta.count for delta in deltas.values())
        size = sum(delta.count * delta.item_bytes for delta in deltas.values())
    return Statistics(
        changed_elements=elements,
        changed_bytes=size,
        total_elements=layout.total_elements,
        dense_bytes=layout.dense_bytes,
        chunk_bytes=chunk_bytes,
    )
