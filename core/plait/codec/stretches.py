"""Stretches: adjacent items of one tensor that are read at once, and what of them each frame has.

They follow from the frames alone, so a publisher lays them out once for all its versions.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.codec import scan
from plait.codec.search import SLACK
from plait.layout import TensorSpec, words_per_item
from plait.weights import UNSIGNED, Piece


@dataclass(frozen=True, slots=True)
class Part:
    """A frame's piece of a tensor; `frame` is its place among the frames of the sweep."""

    frame: int
    piece: Piece


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Items [start, stop) of a tensor, and the parts that lie in them.

    Attributes:
        origin: canonical index of the tensor's first word.
        frames: int64 [parts], each part's place among the frames of the sweep.
        offsets: int64 [parts], frame-local numbers; a frame's changes are in order if they are
            taken by these, those of equal ones by the order of the stretches.
        table: int64 [parts, 5], rows of `scan_pieces`; or of `scan_columns` if there are owners.
        stride, owner: items of a matrix's row, and the part of each of its columns, int32.
    """

    tensor: TensorSpec
    start: int
    stop: int
    origin: int
    frames: NDArray[np.int64]
    offsets: NDArray[np.int64]
    table: NDArray[np.int64]
    stride: int = 0
    owner: NDArray[np.int32] | None = None

    @property
    def parts(self) -> int:
        return self.frames.size

    @property
    def room(self) -> int:
        """Most changes that a scan can find: an item counts in each part that it lies in."""
        if self.owner is not None:
            return self.stop - self.start
        return int((self.table[:, 1] * self.table[:, 3]).sum())

    def scan(
        self, old: NDArray[Any], new: NDArray[Any], scratch: "Scratch",
        ends: NDArray[np.int64], lanes: NDArray[np.uint64],
    ) -> None:  # fmt: skip
        """Appends the parts' changes to the scratch, which has `room` for them.

        Args:
            old, new: the stretch's items, contiguous and read-only, of the tensor's unsigned type.
            ends: [parts + 1], of which the first says where the first change goes; part k's are
                written to [ends[k], ends[k + 1]).
            lanes: [parts, 2], the parts' increments.
        """
        width = words_per_item(self.tensor.item_bytes)
        differences = scratch.differences(self.tensor.item_bytes)
        if self.owner is None:
            scan.scan_pieces(
                old, new, self.table, self.origin + self.start * width, width,
                scratch.positions, differences, ends, lanes,
            )  # fmt: skip
        else:
            scan.scan_columns(
                old, new, self.start, self.stride, self.owner, self.table, self.origin, width,
                scratch.positions, differences, ends, lanes,
            )  # fmt: skip


class Scratch:
    """Room for changes as they are found, for one thread at a time.

    Memory is taken for what was found, not for what might have been.

    Attributes:
        positions: uint32; a scan may write up to SLACK behind what it finds.
    """

    def __init__(self) -> None:
        self.positions = np.empty(0, np.uint32)
        self._differences: dict[int, NDArray[Any]] = {}

    def differences(self, item_bytes: int) -> NDArray[Any]:
        """Of items of that size, for which there is room."""
        return self._differences[item_bytes]

    def make_room(self, item_bytes: int, used: int, more: int) -> None:
        """Room for `more` changes behind the first `used`, of which those held are kept."""
        if self.positions.size < used + more + SLACK:
            self.positions = _larger(self.positions, used, more + SLACK)
        held = self._differences.get(item_bytes, np.empty(0, UNSIGNED[item_bytes]))
        if held.size < used + more:
            self._differences[item_bytes] = _larger(held, used, more)


def _larger(array: NDArray[Any], used: int, more: int) -> NDArray[Any]:
    # Twice what is needed: so stretches find room, and growing costs each change few copies.
    grown = np.empty(2 * (used + more), array.dtype)
    kept = array[:used]
    grown[: kept.size] = kept
    return grown


def stretches(parts: Sequence[Part], block: int) -> list[Stretch]:
    """Stretches of at most `block` items that cover the parts of one tensor."""
    tensor = parts[0].piece.tensor
    origin = parts[0].piece.first_word - parts[0].piece.start_item * words_per_item(
        tensor.item_bytes
    )
    begin = min(part.piece.start_item for part in parts)
    end = max(_end(part.piece) for part in parts)
    borders = [(start, min(start + block, end)) for start in range(begin, end, block)]
    if _are_columns(parts):
        frames = np.array([part.frame for part in parts], np.int64)
        offsets = np.array([part.piece.frame_offset for part in parts], np.int64)
        table, owner = _columns(parts)
        stride = parts[0].piece.stride
        return [
            Stretch(tensor, start, stop, origin, frames, offsets, table, stride, owner)
            for start, stop in borders
        ]
    found = []
    for start, stop in borders:
        rows = [
            (part.frame, at - start, run, part.piece.stride, runs, offset)
            for part in parts
            for at, run, runs, offset in _inside(part.piece, start, stop)
        ]
        table = np.array(rows, np.int64).reshape(-1, 6)
        frames, table = table[:, 0].copy(), table[:, 1:].copy()
        found.append(Stretch(tensor, start, stop, origin, frames, table[:, 4], table))
    return found


def _are_columns(parts: Sequence[Part]) -> bool:
    """Whether the parts are blocks of columns of one matrix, each with columns of its own."""
    strides = {part.piece.stride for part in parts}
    columns = [part.piece.start_item % max(part.piece.stride, 1) for part in parts]
    taken = sorted(zip(columns, (part.piece.run for part in parts), strict=True))
    apart = all(a + run <= b for (a, run), (b, _) in itertools.pairwise(taken))
    return len(strides) == 1 and 0 not in strides and apart and sum(taken[-1]) <= max(strides)


def _columns(parts: Sequence[Part]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The parts' rows for `scan_columns`, and the part of every column."""
    stride = parts[0].piece.stride
    owner, table = np.full(stride, -1, np.int32), np.empty((len(parts), 5), np.int64)
    for number, part in enumerate(parts):
        piece = part.piece
        row, column = divmod(piece.start_item, stride)
        owner[column : column + piece.run] = number
        rows = piece.items // piece.run
        table[number] = (piece.frame_offset, row, rows, piece.run, column)
    return table, owner


def _end(piece: Piece) -> int:
    return piece.start_item + (piece.items // piece.run - 1) * piece.stride + piece.run


def _inside(piece: Piece, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """What of a piece lies in the items [start, stop) of its tensor.

    Yields (first item, run, runs, frame-local number of the first item): a run that the block's
    border cuts apart, then whole runs, then another such run.
    """
    runs, run = piece.items // piece.run, piece.run
    stride = piece.stride or run
    row = max((start - piece.start_item) // stride, 0)
    while row < runs:
        at = piece.start_item + row * stride
        first, end = max(at, start), min(at + run, stop)
        if at >= stop:
            return
        whole = min((stop - at - run) // stride + 1, runs - row) if first == at else 0
        if whole > 0:
            yield at, run, whole, piece.frame_offset + row * run
        elif first < end:
            yield first, end - first, 1, piece.frame_offset + row * run + first - at
        row += max(whole, 1)
