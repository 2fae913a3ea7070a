"""Detection of many frames at once: each stretch of a tensor is read once, for all of them.

Where frames are blocks of columns, a pass for each would go through the same rows again and again.
Here the rows are compared as they lie in memory, and what changed is dealt out to the frames.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from plait.codec import kernels
from plait.codec.algebra import FrameDelta
from plait.cut import FrameSpec
from plait.errors import LayoutChanged
from plait.fingerprint import ZERO, Fingerprint
from plait.layout import Layout, TensorSpec, words_per_item
from plait.weights import UNSIGNED, Piece, Weights, pieces, readable_bits

# Items read at once.
_BLOCK: Final = 1 << 22

# Items [start, stop) of a tensor, before and now: two 1-d arrays of its unsigned type.
Read = Callable[[TensorSpec, int, int], tuple[NDArray[Any], NDArray[Any]]]


@dataclass(frozen=True, slots=True)
class Part:
    """A frame's piece of a tensor; `frame` is its place among the frames of the sweep."""

    frame: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Found:
    """What changed in a part of a frame, which has no change between `offset` and the first."""

    frame: int
    offset: int
    positions: NDArray[np.uint32]
    differences: NDArray[Any]
    increment: Fingerprint


class Scratch:
    """Room for what one block may hold; memory is taken for what it did hold."""

    def __init__(self) -> None:
        self.positions = np.empty(_BLOCK + kernels.SLACK, np.uint32)
        self.places = np.empty(_BLOCK + kernels.SLACK, np.uint32)
        self._items = [np.empty(_BLOCK, np.uint64) for _ in range(3)]

    def items(self, tensor: TensorSpec, number: int) -> NDArray[Any]:
        """One of three arrays of items of the tensor's size, [_BLOCK]."""
        return self._items[number].view(UNSIGNED[tensor.item_bytes])[:_BLOCK]


def detect_frames(frames: Sequence[FrameSpec], old: Weights, new: Weights) -> list[FrameDelta]:
    """What `detect` finds in each of these frames, which share no item.

    Raises:
        LayoutChanged: the two have different layouts.
    """
    old.layout.require_equal(new.layout, what="the new weights")

    def read(tensor: TensorSpec, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
        return (
            readable_bits(old, tensor)[start:stop],
            readable_bits(new, tensor)[start:stop],
        )

    parts, scratch = parts_by_tensor(frames, old.layout), Scratch()
    return join(frames, (found for group in parts for found in compare(group, read, scratch)))


def rounds(frames: Sequence[FrameSpec]) -> Iterator[range]:
    """Numbers of adjacent frames that begin with columns of the same rows; others are alone.

    Those of a round are worth a sweep; `plait.grain` numbers its frames in such rounds.
    """
    first = 0
    for number in range(1, len(frames) + 1):
        if number == len(frames) or not _beside(frames[first], frames[number]):
            yield range(first, number)
            first = number


def _beside(one: FrameSpec, other: FrameSpec) -> bool:
    a, b = (next((s for s in frame.segments if s.repeats > 1), None) for frame in (one, other))
    if a is None or b is None or a.stride != b.stride:
        return False
    return abs(a.first_word - b.first_word) < a.stride


def parts_by_tensor(frames: Sequence[FrameSpec], layout: Layout) -> list[list[Part]]:
    """The frames' pieces, one list for each tensor that they reach."""
    found: dict[str, list[Part]] = {}
    for number, frame in enumerate(frames):
        for piece in pieces(frame, layout):
            found.setdefault(piece.tensor.name, []).append(Part(number, piece))
    return [found[name] for name in sorted(found)]


def compare(
    parts: Sequence[Part], read: Read, scratch: Scratch | None = None, *, block: int | None = None
) -> Iterator[Found]:
    """What changed in the parts of one tensor.

    Args:
        read: called for adjacent blocks, each once, which cover the parts.
        scratch: used by one thread at a time; its own if None.
        block: items that `read` is asked for at once, for a `read` that makes them; at most 2^22.
    Raises:
        LayoutChanged: it gave other arrays than it should.
    """
    tensor = parts[0].piece.tensor
    width = words_per_item(tensor.item_bytes)
    origin = parts[0].piece.first_word - parts[0].piece.start_item * width
    begin = min(part.piece.start_item for part in parts)
    end = max(_end(part.piece) for part in parts)
    blocks = _Blocks(parts) if _are_columns(parts) else None
    scratch = scratch or Scratch()
    positions, differences = scratch.positions, scratch.items(tensor, 0)
    block = _BLOCK if block is None else min(block, _BLOCK)
    for start in range(begin, end, block):
        stop = min(start + block, end)
        old, new = (_checked(bits, tensor, stop - start) for bits in read(tensor, start, stop))
        if blocks is not None:
            yield from blocks.found(old, new, start, origin, scratch)
            continue
        rows = [
            (part.frame, at - start, run, part.piece.stride, runs, offset)
            for part in parts
            for at, run, runs, offset in _inside(part.piece, start, stop)
        ]
        ends, lanes = np.empty(len(rows) + 1, np.int64), np.empty((len(rows), 2), np.uint64)
        kernels.scan_pieces(
            old, new, np.array([row[1:] for row in rows], np.int64).reshape(-1, 5),
            origin + start * width, width, positions, differences, ends, lanes,
        )  # fmt: skip
        for k, (frame, *_, offset) in enumerate(rows):
            yield from _found(
                frame, offset, positions, differences, slice(ends[k], ends[k + 1]), lanes[k]
            )


def _found(
    frame: int, offset: int, positions: NDArray[np.uint32], differences: NDArray[Any],
    mine: slice, lanes: NDArray[np.uint64],
) -> Iterator[Found]:  # fmt: skip
    """A part's changes, copied from the scratch, if there are any."""
    if mine.start < mine.stop:
        increment = Fingerprint(int(lanes[0]), int(lanes[1]))
        yield Found(frame, offset, positions[mine].copy(), differences[mine].copy(), increment)


def _are_columns(parts: Sequence[Part]) -> bool:
    """Whether the parts are blocks of columns of one matrix, beside or below each other."""
    strides = {part.piece.stride for part in parts}
    columns = [part.piece.start_item % max(part.piece.stride, 1) for part in parts]
    taken = sorted(zip(columns, (part.piece.run for part in parts), strict=True))
    apart = all(a + run <= b for (a, run), (b, _) in itertools.pairwise(taken))
    return len(strides) == 1 and 0 not in strides and apart and sum(taken[-1]) <= max(strides)


class _Blocks:
    """Blocks of columns, for a kernel that looks at their rows once."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._stride = parts[0].piece.stride
        self._owner = np.full(self._stride, -1, np.int32)
        self._rows = np.empty((len(parts), 5), np.int64)
        for number, part in enumerate(parts):
            piece = part.piece
            row, column = divmod(piece.start_item, self._stride)
            self._owner[column : column + piece.run] = number
            rows = piece.items // piece.run
            self._rows[number] = (piece.frame_offset, row, rows, piece.run, column)

    def found(
        self, old: NDArray[Any], new: NDArray[Any], start: int, origin: int, scratch: "Scratch"
    ) -> Iterator[Found]:
        """What changed in the tensor's items from `start` on."""
        tensor = self._parts[0].piece.tensor
        positions, differences = scratch.positions, scratch.items(tensor, 0)
        ends = np.empty(len(self._parts) + 2, np.int64)
        lanes = np.empty((len(self._parts), 2), np.uint64)
        width = words_per_item(old.itemsize)
        kernels.scan_columns(
            old, new, start, self._stride, self._owner, self._rows, origin, width,
            positions, differences, ends, lanes,
            scratch.places, scratch.items(tensor, 1), scratch.items(tensor, 2),
        )  # fmt: skip
        for number, part in enumerate(self._parts):
            mine = slice(ends[number + 1], ends[number + 2])
            at = int(positions[mine.start]) if mine.start < mine.stop else 0
            yield from _found(part.frame, at, positions, differences, mine, lanes[number])


def join(frames: Sequence[FrameSpec], found: Iterable[Found]) -> list[FrameDelta]:
    """One delta for each frame."""
    rows: list[list[Found]] = [[] for _ in frames]
    for part in found:
        rows[part.frame].append(part)
    return [_joined(frame, parts) for frame, parts in zip(frames, rows, strict=True)]


def _joined(frame: FrameSpec, parts: list[Found]) -> FrameDelta:
    parts.sort(key=lambda part: part.offset)
    empty = np.empty(0, UNSIGNED[frame.item_bytes])
    return FrameDelta(
        frame.item_bytes,
        np.concatenate([np.empty(0, np.uint32), *(part.positions for part in parts)]),
        np.concatenate([empty, *(part.differences for part in parts)]),
        sum((part.increment for part in parts), ZERO),
    )


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


def _checked(bits: NDArray[Any], tensor: TensorSpec, items: int) -> NDArray[Any]:
    """As the kernel, which checks nothing, relies on it."""
    if bits.dtype != UNSIGNED[tensor.item_bytes] or bits.shape != (items,):
        raise LayoutChanged(
            f"{tensor.name!r} gave {bits.dtype}{list(bits.shape)} for {items} items "
            f"of {tensor.dtype}"
        )
    bits = np.ascontiguousarray(bits).view()
    bits.flags.writeable = False
    return bits
