"""The delta algebra: frames' differences as a group, and what they do to weights.

A delta is a sparse vector of differences `(new - old) mod 2^bits` over the raw bits, so adding
composes, negating reverses, and the same delta serves both directions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from plait.codec import scan, scatter
from plait.codec.search import SLACK
from plait.cut import FrameSpec
from plait.errors import ChunkInvalid, UsageError
from plait.fingerprint import ZERO, Fingerprint
from plait.layout import words_per_item
from plait.weights import UNSIGNED, Piece, Weights, pieces, readable_bits, writable_bits

Positions = NDArray[np.uint32]

# Compared at once: what a scan may find is held for so many items, what it did find for all.
_SCAN_ITEMS: Final = 1 << 22


@dataclass(frozen=True, eq=False)
class FrameDelta:
    """What changed in one frame.

    Attributes:
        item_bytes: 1, 2, 4 or 8.
        positions: uint32 [count], frame-local item numbers, strictly increasing.
        differences: unsigned [count] of item_bytes, (new - old) modulo 2^bits, never 0.
        increment: fingerprint of new minus fingerprint of old. Read from a chunk it is a claim:
            `increment_on` computes it from live weights.

    Raises:
        ChunkInvalid: its parts break these rules.
    """

    item_bytes: int
    positions: Positions
    differences: NDArray[Any]
    increment: Fingerprint

    def __post_init__(self) -> None:
        wanted = UNSIGNED.get(self.item_bytes)
        if wanted is None:
            raise ChunkInvalid(f"a delta of {self.item_bytes}-byte items; expected 1, 2, 4 or 8")
        if self.positions.dtype != np.uint32 or self.differences.dtype != wanted:
            raise ChunkInvalid(
                f"a delta has uint32 positions and {wanted} differences, got "
                f"{self.positions.dtype} and {self.differences.dtype}"
            )
        if self.positions.ndim != 1 or self.positions.shape != self.differences.shape:
            raise ChunkInvalid(
                f"a delta of {self.positions.shape} positions, {self.differences.shape} differences"
            )
        # Strided views are legal numpy, but the kernels read adjacent memory.
        for name in ("positions", "differences"):
            array = np.ascontiguousarray(getattr(self, name)).view()
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if not scatter.increases(self.positions):
            raise ChunkInvalid("a delta's positions must increase strictly")
        if not self.differences.all():
            raise ChunkInvalid("a delta holds a difference of zero")

    @property
    def count(self) -> int:
        return self.positions.size


class Comparison:
    """Old and new bits of a frame, compared part by part in the order of its items.

    Until it is dropped it takes 4 bytes and an item for every change, and for every item of
    _SCAN_ITEMS.
    """

    def __init__(self, frame: FrameSpec) -> None:
        self._frame = frame
        scanned = min(frame.items, _SCAN_ITEMS)
        self._positions = np.empty(scanned + SLACK, np.uint32)
        self._differences = np.empty(scanned, UNSIGNED[frame.item_bytes])
        self._held = 0  # changes in the two arrays
        self._found: list[tuple[Positions, NDArray[Any]]] = []
        self._end = 0
        self._increment = ZERO

    def add_piece(self, piece: Piece, old: Weights, new: Weights) -> None:
        """Compares a piece of the frame where it lies in its tensor.

        Raises:
            LayoutChanged: the weights don't fit their layout.
            UsageError: not behind what was compared before, or beyond the frame.
        """
        start_word = piece.first_word - piece.start_item * words_per_item(self._frame.item_bytes)
        self._scan(
            readable_bits(old, piece.tensor), readable_bits(new, piece.tensor),
            piece.start_item, piece.run, piece.stride, piece.items // piece.run,
            piece.frame_offset, start_word,
        )  # fmt: skip

    def add_run(
        self, old: NDArray[Any], new: NDArray[Any], *, first_word: int, offset: int
    ) -> None:
        """Compares adjacent items, wherever they are held.

        Args:
            old, new: 1-d unsigned of the frame's item size, equally long.
            first_word: canonical index of the first item's first word.
            offset: frame-local number of the first item.
        Raises:
            UsageError: other arrays, not behind what was compared before, or beyond the frame.
        """
        wanted = self._differences.dtype
        if old.ndim != 1 or old.shape != new.shape or not (old.dtype == new.dtype == wanted):
            raise UsageError(
                f"a run compares {old.dtype}{list(old.shape)} with {new.dtype}{list(new.shape)}; "
                f"expected {wanted} of one length"
            )
        # The kernels read adjacent memory, and are compiled once, for read-only arrays.
        before, after = (np.ascontiguousarray(bits).view() for bits in (old, new))
        before.flags.writeable = after.flags.writeable = False
        self._scan(before, after, 0, old.size, 0, 1, offset, first_word)

    def delta(self) -> FrameDelta:
        """What differs in all parts together."""
        self._make_room(self._differences.size)
        positions, differences = zip(*self._found, strict=True) if self._found else ((), ())
        return FrameDelta(
            self._frame.item_bytes,
            np.concatenate([np.empty(0, np.uint32), *positions]),
            np.concatenate([np.empty(0, self._differences.dtype), *differences]),
            self._increment,
        )

    def _scan(
        self, old: NDArray[Any], new: NDArray[Any],
        start: int, run: int, stride: int, repeats: int, offset: int, start_word: int,
    ) -> None:  # fmt: skip
        end = offset + run * repeats
        if offset < self._end or end > self._frame.items:
            raise UsageError(
                f"items {offset} to {end} of a frame of {self._frame.items} items can't be "
                f"compared behind item {self._end}"
            )
        for row, rows, item, items in _slices(run, repeats):
            self._make_room(rows * items)
            self._held, *lanes = scan.scan_piece(
                old, new, start + row * stride + item, items, stride, rows,
                offset + row * run + item, start_word, words_per_item(self._frame.item_bytes),
                self._positions, self._differences, self._held,
            )  # fmt: skip
            self._increment += Fingerprint(*map(int, lanes))
        self._end = end

    def _make_room(self, items: int) -> None:
        """For the changes of so many items, beside those that are held."""
        held = self._held
        if held and held + items > self._differences.size:
            self._found.append((self._positions[:held].copy(), self._differences[:held].copy()))
            self._held = 0


def _slices(run: int, repeats: int) -> Iterator[tuple[int, int, int, int]]:
    """Parts of at most _SCAN_ITEMS items: first row, rows, first item of a row, items of a row."""
    rows = max(_SCAN_ITEMS // max(run, 1), 1)
    for row in range(0, repeats, rows):
        for item in range(0, run, _SCAN_ITEMS):
            yield row, min(rows, repeats - row), item, min(_SCAN_ITEMS, run - item)


def detect(frame: FrameSpec, old: Weights, new: Weights) -> FrameDelta:
    """The delta from `old` to `new` within a frame: one pass over both, without a copy.

    Args:
        frame: of a cut that was checked against the layout of both.
    Raises:
        LayoutChanged: the two have different layouts.
    """
    old.layout.require_equal(new.layout, what="the new weights")
    comparison = Comparison(frame)
    for piece in pieces(frame, old.layout):
        comparison.add_piece(piece, old, new)
    return comparison.delta()


def negate(delta: FrameDelta) -> FrameDelta:
    """The delta that leads back."""
    differences = (~delta.differences) + delta.differences.dtype.type(1)
    return FrameDelta(delta.item_bytes, delta.positions, differences, -delta.increment)


def add(first: FrameDelta, second: FrameDelta) -> FrameDelta:
    """One delta of a frame for two in a row; what changed back is left out.

    Raises:
        ChunkInvalid: they have items of different sizes.
    """
    if first.item_bytes != second.item_bytes:
        raise ChunkInvalid(
            f"deltas of {first.item_bytes}- and {second.item_bytes}-byte items can't be added"
        )
    size = first.count + second.count
    positions = np.empty(size, np.uint32)
    differences = np.empty(size, first.differences.dtype)
    count = scatter.merge(
        first.positions, first.differences, second.positions, second.differences,
        positions, differences,
    )  # fmt: skip
    increment = first.increment + second.increment
    return FrameDelta(first.item_bytes, positions[:count], differences[:count], increment)


def apply(frame: FrameSpec, weights: Weights, delta: FrameDelta) -> None:
    """Adds the delta to the weights, in place. The caller has checked that they are its base.

    Not idempotent. Every refusal comes before the first write.

    Raises:
        ChunkInvalid: the delta doesn't fit the frame.
        LayoutChanged, UsageError: the weights don't fit their layout, or are read-only.
    """
    touched = list(_touched(frame, weights, delta))
    placed = [(piece, rows, writable_bits(weights, piece.tensor)) for piece, rows in touched]
    for piece, rows, bits in placed:
        scatter.add_at(
            bits, piece.start_item, piece.run, piece.stride, piece.frame_offset,
            delta.positions[rows], delta.differences[rows],
        )  # fmt: skip


def increment_on(frame: FrameSpec, weights: Weights, delta: FrameDelta) -> Fingerprint:
    """What the increment of the delta is on these weights; writes nothing.

    It equals `delta.increment` exactly if the words that the delta touches hold the bits that it
    was made from. Words that it doesn't touch aren't read.

    Raises:
        ChunkInvalid: the delta doesn't fit the frame.
    """
    width = words_per_item(frame.item_bytes)
    increment = ZERO
    for piece, rows in _touched(frame, weights, delta):
        lanes = scatter.increment_at(
            readable_bits(weights, piece.tensor), piece.start_item, piece.run, piece.stride,
            piece.frame_offset, piece.first_word - piece.start_item * width, width,
            delta.positions[rows], delta.differences[rows],
        )  # fmt: skip
        increment += Fingerprint(*map(int, lanes))
    return increment


def _touched(
    frame: FrameSpec, weights: Weights, delta: FrameDelta
) -> Iterator[tuple[Piece, slice]]:
    """The frame's pieces that the delta changes, with the delta's rows for each."""
    if delta.item_bytes != frame.item_bytes:
        raise ChunkInvalid(
            f"a delta of {delta.item_bytes}-byte items for a frame of {frame.item_bytes}-byte items"
        )
    if delta.count and int(delta.positions[-1]) >= frame.items:
        raise ChunkInvalid(
            f"a delta changes item {delta.positions[-1]} of a frame of {frame.items} items"
        )
    parts = pieces(frame, weights.layout)
    bounds = np.array([*(piece.frame_offset for piece in parts), frame.items], np.uint32)
    rows = np.searchsorted(delta.positions, bounds)
    for piece, first, end in zip(parts, rows, rows[1:], strict=False):
        if first < end:
            yield piece, slice(int(first), int(end))
