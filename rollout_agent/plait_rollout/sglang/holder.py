"""One holder of a part of the weights: its pieces, and moving them in place.

Every rank of an engine is one; so is the agent itself for tensors that the engine doesn't hold.
Nothing here knows SGLang.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from plait import weights
from plait.codec.algebra import FrameDelta, add, negate
from plait.codec.frames import decode_delta, encode_delta
from plait.cut import FrameSpec, Segment
from plait.errors import ChunkInvalid, EngineRefused
from plait.fingerprint import Fingerprint, fingerprint_at
from plait.layout import Layout, TensorSpec, words_per_item
from plait.tensors import DTYPES, fingerprint_slab, gather_at, scatter_at, storage_bits
from plait.weights import UNSIGNED
from plait_rollout.sglang.pieces import Piece
from plait_rollout.sglang.tally import Tally

# Positions and words are int64 temporaries, made for this many items at once.
_SLICE: Final = 1 << 20

Tensors = Callable[[], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Part:
    """The staged change of one piece: 6 bytes an item for 2-byte types, and 2 for the old bits.

    Attributes:
        piece: its number.
        numbers: of the changed items in the piece (uint32, or int64 in a huge one), each once.
        differences: new minus old, modulo 2^bits.
        old: the bits that stand there; what an undo writes back.
    """

    piece: int
    numbers: NDArray[Any]
    differences: NDArray[Any]
    old: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Staged:
    """A move as one holder sees it. `increment`: target minus base over the words it touches."""

    parts: tuple[Part, ...]
    before: Tally
    increment: Tally

    def undo_list(self) -> "Staged":
        """What an undo needs of it: no differences, so that the next move finds room."""
        parts = tuple(replace(part, differences=part.differences[:0].copy()) for part in self.parts)
        return Staged(parts, self.before, self.increment)


class Holder:
    """Pieces of a layout in live tensors.

    Args:
        layout: canonical.
        pieces: of this holder; a piece's number is its place here.
        tensors: gives the live tensors by parameter name; asked anew for every operation, since
            an engine may have replaced one.
    """

    def __init__(self, layout: Layout, pieces: tuple[Piece, ...], tensors: Tensors) -> None:
        self.layout = layout
        self.pieces = pieces
        self._tensors = tensors
        self._by_tensor: dict[str, list[int]] = {}
        for number, piece in enumerate(pieces):
            self._by_tensor.setdefault(piece.tensor, []).append(number)
        self._shapes = {
            name: _shape(tensor)
            for name, tensor in tensors().items()
            if any(piece.parameter == name for piece in pieces)
        }

    def warm_up(self) -> None:
        """Compiles the kernels that a move of these pieces runs, so that no pause waits for it."""
        sizes = {self.layout[piece.tensor].item_bytes for piece in self.pieces}
        for size in sizes:
            dtype = {1: "U8", 2: "I16", 4: "I32", 8: "I64"}[size]
            layout = Layout.of([TensorSpec("warm", dtype, (4, 4))])
            items = torch.zeros(16 * size, dtype=torch.uint8).view(DTYPES[dtype])
            piece = Piece("warm", "warm", (2, 2), 0, (4, 1), 0, (4, 1))
            holder = Holder(layout, (piece,), lambda items=items: {"warm": items})  # type: ignore[misc]
            frame = FrameSpec(size, (Segment(0, 16, 0, 1),))
            differences = np.ones(1, UNSIGNED[size])
            delta = FrameDelta(size, np.zeros(1, np.uint32), differences, Fingerprint())
            encoded = encode_delta(0, frame, delta)
            total = add(decode_delta(encoded, frame), negate(delta))
            staged = holder.stage(iter([(frame, total), (frame, delta)]), frozenset())
            holder.apply(staged, frozenset())
            holder.undo(staged, frozenset())
            holder.fingerprint(frozenset())

    def wants(self, frame: FrameSpec) -> bool:
        """Whether any of the frame's items may be held here."""
        return any(
            self._reaches(self.pieces[number], part)
            for part in weights.pieces(frame, self.layout)
            for number in self._by_tensor.get(part.tensor.name, ())
        )

    def fingerprint(self, shared: Collection[int]) -> Tally:
        """A full re-read of every piece."""
        flats, tally = self._flats(), Tally()
        for number, piece in enumerate(self.pieces):
            width = words_per_item(self.layout[piece.tensor].item_bytes)
            value = fingerprint_slab(
                flats[piece.parameter],
                piece.target_start,
                piece.sizes,
                piece.target_strides,
                self.layout.start_of(piece.tensor) + piece.source_start * width,
                [stride * width for stride in piece.source_strides],
            )
            tally.add(number, value, piece.items, shared)
        return tally

    def stage(
        self, deltas: Iterator[tuple[FrameSpec, FrameDelta]], shared: Collection[int]
    ) -> Staged:
        """Restricts added-up frames to what is held here and reads the bits that stand there.

        Writes nothing.

        Raises:
            ChunkInvalid: a delta doesn't fit its frame.
        """
        found: dict[int, list[tuple[NDArray[Any], NDArray[Any]]]] = {}
        for frame, delta in deltas:
            for number, numbers, differences in self._restrict(frame, delta):
                found.setdefault(number, []).append((numbers, differences))
        flats = self._flats()
        parts, before, increment = [], Tally(), Tally()
        while found:
            number, rows = found.popitem()
            piece = self.pieces[number]
            numbers = np.concatenate([row[0] for row in rows])
            differences = np.concatenate([row[1] for row in rows])
            part = Part(number, numbers, differences, _read(flats, piece, numbers))
            old = self._sum(piece, numbers, part.old)
            before.add(number, old, numbers.size, shared)
            increment.add(
                number, self._sum(piece, numbers, part.old, differences) - old, numbers.size, shared
            )
            parts.append(part)
        return Staged(tuple(parts), before, increment)

    def apply(self, staged: Staged, shared: Collection[int]) -> Tally:
        """Writes the new bits and re-reads them; returns the sums over the touched words.

        Raises:
            EngineRefused: the live bits aren't those that were staged; nothing was written.
        """
        flats = self._flats()
        for part in staged.parts:
            piece = self.pieces[part.piece]
            if not np.array_equal(_read(flats, piece, part.numbers), part.old):
                raise EngineRefused(
                    f"bits of {piece.tensor!r} changed between stage and apply; nothing was written"
                )
        for part in staged.parts:
            _write(flats, self.pieces[part.piece], part.numbers, part.old, part.differences)
        return self._reread(flats, staged, shared)

    def undo(self, staged: Staged, shared: Collection[int]) -> Tally:
        """Writes the old bits back, however much of the move was written; re-reads them."""
        flats = self._flats()
        for part in staged.parts:
            _write(flats, self.pieces[part.piece], part.numbers, part.old)
        return self._reread(flats, staged, shared)

    def _reread(
        self, flats: Mapping[str, torch.Tensor], staged: Staged, shared: Collection[int]
    ) -> Tally:
        _settle(flats.values())
        tally = Tally()
        for part in staged.parts:
            piece = self.pieces[part.piece]
            bits = _read(flats, piece, part.numbers)
            tally.add(part.piece, self._sum(piece, part.numbers, bits), part.numbers.size, shared)
        return tally

    def _sum(
        self,
        piece: Piece,
        numbers: NDArray[Any],
        bits: NDArray[Any],
        differences: NDArray[Any] | None = None,
    ) -> Fingerprint:
        """Fingerprint of items, or of items plus differences."""
        first, total = self.layout.start_of(piece.tensor), Fingerprint()
        for start in range(0, numbers.size, _SLICE):
            part = slice(start, start + _SLICE)
            words = piece.words(numbers[part], first, bits.itemsize)
            values = bits[part] if differences is None else bits[part] + differences[part]
            total += fingerprint_at(words, values)
        return total

    def _restrict(
        self, frame: FrameSpec, delta: FrameDelta
    ) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
        """The delta's items held here: (piece number, item numbers, differences)."""
        if delta.item_bytes != frame.item_bytes or (
            delta.count and int(delta.positions[-1]) >= frame.items
        ):
            raise ChunkInvalid(
                f"a delta of {delta.item_bytes}-byte items reaches beyond its frame "
                f"of {frame.items} items of {frame.item_bytes} bytes"
            )
        parts = weights.pieces(frame, self.layout)
        bounds = np.array([*(part.frame_offset for part in parts), frame.items], np.int64)
        rows = np.searchsorted(delta.positions, bounds.astype(np.uint32))
        for part, first, end in zip(parts, rows, rows[1:], strict=False):
            if first == end or part.tensor.name not in self._by_tensor:
                continue
            local = delta.positions[first:end].astype(np.int64) - part.frame_offset
            if part.run != part.items:
                local = local // part.run * part.stride + local % part.run
            items = local + part.start_item
            for number in self._by_tensor[part.tensor.name]:
                piece = self.pieces[number]
                numbers = piece.numbers_of(items)
                mine = numbers >= 0
                if mine.any():
                    compact = np.uint32 if piece.items <= 1 << 32 else np.int64
                    yield number, numbers[mine].astype(compact), delta.differences[first:end][mine]

    @staticmethod
    def _reaches(piece: Piece, part: weights.Piece) -> bool:
        """Whether the two blocks of one tensor may share an item; exact for blocks of columns."""
        last = piece.source_start + sum(
            (size - 1) * stride
            for size, stride in zip(piece.sizes, piece.source_strides, strict=True)
        )
        runs = part.items // part.run
        if last < part.start_item or piece.source_start >= part.start_item + (
            (runs - 1) * part.stride + part.run
        ):
            return False
        if runs == 1 or len(piece.sizes) != 2 or piece.source_strides != (part.stride, 1):
            return True
        column = (piece.source_start - part.start_item) % part.stride
        return column < part.run or column + piece.sizes[1] > part.stride

    def _flats(self) -> Mapping[str, torch.Tensor]:
        live = self._tensors()
        for name, shape in self._shapes.items():
            found = _shape(live[name]) if name in live else None
            if found != shape:
                raise EngineRefused(
                    f"the engine replaced {name!r}, mapped as {shape}, by {found}",
                    remedy="attach again",
                )
        return {name: storage_bits(live[name]) for name in self._shapes}


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        str(tensor.dtype), tuple(tensor.shape), tensor.stride(), tensor.storage_offset(),
        tensor.untyped_storage().nbytes(), str(tensor.device),
    )  # fmt: skip


def _read(flats: Mapping[str, torch.Tensor], piece: Piece, numbers: NDArray[Any]) -> NDArray[Any]:
    flat = flats[piece.parameter]
    read = [
        gather_at(flat, piece.target_items(numbers[start : start + _SLICE]))
        for start in range(0, numbers.size, _SLICE)
    ]
    return read[0] if len(read) == 1 else np.concatenate(read)


def _write(
    flats: Mapping[str, torch.Tensor],
    piece: Piece,
    numbers: NDArray[Any],
    bits: NDArray[Any],
    differences: NDArray[Any] | None = None,
) -> None:
    for start in range(0, numbers.size, _SLICE):
        part = slice(start, start + _SLICE)
        values = bits[part] if differences is None else bits[part] + differences[part]
        scatter_at(flats[piece.parameter], piece.target_items(numbers[part]), values)


def _settle(tensors: Any) -> None:
    """Waits until what was written is what any stream reads."""
    for device in {tensor.device for tensor in tensors}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
