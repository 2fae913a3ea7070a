"""The codec in torch's integer operations: the same bytes on any device.

For weights that live on an accelerator: changes are found, packed into planes and added where the
weights are, and only what changed travels. On a CPU the compiled kernels of `plait.codec` are
several times faster, and equal bit for bit. zstd runs on the host.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from plait.codec.algebra import FrameDelta
from plait.codec.dense import plane_names
from plait.codec.frames import EncodedFrame, Mode
from plait.codec.gaps import SKIP
from plait.codec.planes import pack_plane
from plait.cut import FrameSpec
from plait.errors import ChunkInvalid, LayoutChanged, UsageError
from plait.fingerprint import ZERO, Fingerprint
from plait.layout import Layout, words_per_item
from plait.limits import RESTART_ELEMENTS
from plait.tensors.bits import INTEGERS, dtype_name, integer_view
from plait.tensors.fingerprint import fingerprint_items
from plait.weights import UNSIGNED, Piece, pieces

Tensors = Mapping[str, torch.Tensor]

# Items compared at once: a mask, and positions of 8 bytes for what changed.
_SLICE: Final = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class TensorDelta:
    """A `FrameDelta` whose arrays lie on a device.

    Attributes:
        item_bytes: 1, 2, 4 or 8.
        positions: int64 [count], frame-local item numbers, strictly increasing.
        differences: uint8, int16, int32 or int64 [count]: the unsigned differences' bits.
        increment: as in FrameDelta.
    """

    item_bytes: int
    positions: torch.Tensor
    differences: torch.Tensor
    increment: Fingerprint

    @property
    def count(self) -> int:
        return self.positions.numel()

    def to_host(self) -> FrameDelta:
        """The same delta in numpy arrays.

        Raises:
            ChunkInvalid: it is no delta.
        """
        positions = self.positions.cpu().numpy().astype(np.uint32)
        differences = self.differences.cpu().numpy().view(UNSIGNED[self.item_bytes])
        return FrameDelta(self.item_bytes, positions, differences, self.increment)

    @classmethod
    def of(cls, delta: FrameDelta, device: torch.device | str) -> "TensorDelta":
        """A decoded delta, sent to a device."""
        size = delta.item_bytes
        signed = delta.differences.view("u1" if size == 1 else f"<i{size}").copy()
        positions = torch.from_numpy(delta.positions.astype(np.int64))
        return cls(size, positions.to(device), torch.from_numpy(signed).to(device), delta.increment)


def detect(frame: FrameSpec, layout: Layout, old: Tensors, new: Tensors) -> TensorDelta:
    """The delta from `old` to `new` within a frame of a cut that was checked against the layout.

    Args:
        old, new: contiguous tensors by canonical name, all on one device.
    Raises:
        LayoutChanged, UsageError: a tensor is missing, of another dtype or shape, strided, or on
            another device.
    """
    flats = [(piece, _flat(piece, old), _flat(piece, new)) for piece in pieces(frame, layout)]
    device = flats[0][2].device
    for piece, *both in flats:
        _require_device(piece, both, device)
    found = [
        (
            torch.empty(0, dtype=torch.int64, device=device),
            torch.empty(0, dtype=INTEGERS[frame.item_bytes], device=device),
        )
    ]
    increment = ZERO
    for piece, before, after in flats:
        for local in _changed(piece, before, after):
            items = _items(piece, local)
            was, now = before[items], after[items]
            words = _words(piece, items)
            increment += fingerprint_items(words, now) - fingerprint_items(words, was)
            found.append((local + piece.frame_offset, now - was))
    positions, differences = (torch.cat(parts) for parts in zip(*found, strict=True))
    return TensorDelta(frame.item_bytes, positions, differences, increment)


def planes_of(frame: FrameSpec, delta: TensorDelta) -> dict[str, torch.Tensor]:
    """The decoded planes of a delta's frame, uint8, empty ones left out; on the delta's device.

    Raises:
        ChunkInvalid: the delta doesn't fit the frame.
    """
    _check_fit(frame, delta)
    if not delta.count:
        return {}
    planes = _wide_planes(frame, delta) if frame.item_bytes > 2 else _sparse_planes(frame, delta)
    return {name: plane for name, plane in sorted(planes.items()) if plane.numel()}


def encode_delta(number: int, frame: FrameSpec, delta: TensorDelta) -> EncodedFrame:
    """As `plait.codec.encode_delta`, of which it makes the same bytes."""
    mode: Mode = "wide" if frame.item_bytes > 2 else "delta"
    planes = planes_of(frame, delta).items()
    packed = tuple(pack_plane(name, plane.cpu().numpy()) for name, plane in planes)
    return EncodedFrame(number, mode, delta.count, packed, delta.increment)


def apply(frame: FrameSpec, layout: Layout, weights: Tensors, delta: TensorDelta) -> None:
    """Adds the delta to the weights, in place. The caller has checked that they are its base.

    Every refusal comes before the first write.

    Raises:
        ChunkInvalid: the delta doesn't fit the frame.
        LayoutChanged, UsageError: the weights don't fit their layout, are strided, or on another
            device than the delta.
    """
    for flat, _, items, differences in list(_touched(frame, layout, weights, delta)):
        flat[items] = flat[items] + differences


def increment_on(
    frame: FrameSpec, layout: Layout, weights: Tensors, delta: TensorDelta
) -> Fingerprint:
    """What the increment of the delta is on these weights; writes nothing.

    Raises:
        As `apply`.
    """
    increment = ZERO
    for flat, words, items, differences in _touched(frame, layout, weights, delta):
        bits = flat[items]
        increment += fingerprint_items(words, bits + differences) - fingerprint_items(words, bits)
    return increment


def _touched(
    frame: FrameSpec, layout: Layout, weights: Tensors, delta: TensorDelta
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(flat tensor, words, items in it, differences) of every piece that the delta changes."""
    _check_fit(frame, delta)
    parts = pieces(frame, layout)
    offsets = [*(piece.frame_offset for piece in parts), frame.items]
    bounds = torch.tensor(offsets, device=delta.positions.device)
    rows = torch.searchsorted(delta.positions, bounds).tolist()
    for piece, first, end in zip(parts, rows, rows[1:], strict=False):
        if first < end:
            items = _items(piece, delta.positions[first:end] - piece.frame_offset)
            flat = _flat(piece, weights)
            _require_device(piece, [flat], delta.positions.device)
            yield flat, _words(piece, items), items, delta.differences[first:end]


def _changed(piece: Piece, old: torch.Tensor, new: torch.Tensor) -> Iterator[torch.Tensor]:
    """Numbers in the piece of the items that differ, int64, a slice at a time."""
    rows = max(_SLICE // piece.run, 1)
    for row in range(0, piece.items // piece.run, rows):
        for start in range(0, piece.run, _SLICE):
            run = min(_SLICE, piece.run - start)
            sizes = (min(rows, piece.items // piece.run - row), run)
            place = piece.start_item + row * piece.stride + start
            a, b = (
                flat.as_strided(sizes, (piece.stride, 1), flat.storage_offset() + place)
                for flat in (old, new)
            )
            # Slices of one run, or of whole ones: so these numbers follow each other.
            local = (a != b).reshape(-1).nonzero().squeeze(1)
            if local.numel():
                yield local + (row * piece.run + start)


def _items(piece: Piece, local: torch.Tensor) -> torch.Tensor:
    """Places in the tensor of the piece's items."""
    if piece.run == piece.items:
        return local + piece.start_item
    row = torch.div(local, piece.run, rounding_mode="floor")
    return local + row * (piece.stride - piece.run) + piece.start_item


def _words(piece: Piece, items: torch.Tensor) -> torch.Tensor:
    width = words_per_item(piece.tensor.item_bytes)
    return (items - piece.start_item) * width + piece.first_word


def _flat(piece: Piece, tensors: Tensors) -> torch.Tensor:
    wanted = piece.tensor
    tensor = tensors.get(wanted.name)
    held = None if tensor is None else (dtype_name(tensor.dtype), tuple(tensor.shape))
    if tensor is None or held != (wanted.dtype, wanted.shape):
        raise LayoutChanged(
            f"{wanted.name!r} is {held}, expected {wanted.dtype}{list(wanted.shape)}"
        )
    return integer_view(tensor)


def _require_device(piece: Piece, flats: Sequence[torch.Tensor], device: torch.device) -> None:
    for flat in flats:
        if flat.device != device:
            raise UsageError(f"{piece.tensor.name!r} is on {flat.device}, expected on {device}")


def _check_fit(frame: FrameSpec, delta: TensorDelta) -> None:
    if delta.item_bytes != frame.item_bytes:
        raise ChunkInvalid(
            f"a delta of {delta.item_bytes}-byte items for a frame of {frame.item_bytes}-byte items"
        )
    if delta.count and int(delta.positions[-1]) >= frame.items:
        raise ChunkInvalid(
            f"a delta changes item {int(delta.positions[-1])} of a frame of {frame.items} items"
        )


def _wide_planes(frame: FrameSpec, delta: TensorDelta) -> dict[str, torch.Tensor]:
    dense = delta.differences.new_zeros(frame.items)
    dense[delta.positions] = delta.differences
    rows = dense.view(torch.uint8).reshape(frame.items, frame.item_bytes)
    return {name: rows[:, k].contiguous() for k, name in enumerate(plane_names(frame.item_bytes))}


def _sparse_planes(frame: FrameSpec, delta: TensorDelta) -> dict[str, torch.Tensor]:
    positions, differences = delta.positions, delta.differences
    block = torch.div(positions, RESTART_ELEMENTS, rounding_mode="floor")
    before = torch.cat([positions.new_full((1,), -1), positions[:-1]])
    # The count starts anew in every block, at its first item.
    gaps = positions - torch.maximum(before, block * RESTART_ELEMENTS - 1) - 1
    ends = (torch.div(gaps, SKIP, rounding_mode="floor") + 1).cumsum(0)
    gap = torch.full((int(ends[-1]),), SKIP, dtype=torch.uint8, device=positions.device)
    gap[ends - 1] = (gaps % SKIP).to(torch.uint8)
    blocks = -(-frame.items // RESTART_ELEMENTS)
    starts = torch.arange(1, blocks, device=positions.device) * RESTART_ELEMENTS
    element = torch.searchsorted(positions, starts)
    columns = [_before(ends, element), element]
    planes = {"gap": gap}
    if frame.item_bytes == 1:
        planes["byte"] = differences
    else:
        classes, small, raw = _classes(differences)
        quads = torch.nn.functional.pad(classes, (0, -classes.numel() % 4)).reshape(-1, 4)
        packed = quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6
        planes |= {"class": packed.to(torch.uint8), "small": small, "raw": raw}
        columns += [_before((classes == number).cumsum(0), element) for number in (2, 3)]
    marks = torch.stack(columns, 1).to(torch.int32).reshape(-1)
    return planes | {"restart": marks.view(torch.uint8)}


def _classes(differences: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The class of every 2-byte difference (int32), and the planes `small` and `raw`."""
    signed = differences.to(torch.int32)
    zigzag = (signed << 1) ^ (signed >> 31)
    classes = torch.where(zigzag > 255, 3, 2)
    classes = torch.where(signed == 1, 0, torch.where(signed == -1, 1, classes)).to(torch.int32)
    raw = differences[classes == 3].contiguous()
    return classes, zigzag[classes == 2].to(torch.uint8), raw.view(torch.uint8)


def _before(counts: torch.Tensor, element: torch.Tensor) -> torch.Tensor:
    """Running counts as they stand before each of these elements."""
    return torch.cat([counts.new_zeros(1), counts])[element]
