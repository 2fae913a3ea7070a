"""The tensors of a module in this process, as bits on whatever device they lie."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from plait.cut import FrameSpec
from plait.errors import EngineRefused, LayoutChanged, MapUnproven, UsageError
from plait.fingerprint import ZERO, Fingerprint
from plait.layout import Layout, words_per_item
from plait.tensors import (
    fingerprint_slab,
    gather_at,
    integer_view,
    layout_of_tensors,
    scatter_at,
)
from plait.weights import UNSIGNED, Weights
from plait_rollout.staging import StagedFrame
from plait_rollout.touched import Bits, Positions, by_tensor

# Whole tensors are written in parts of this many items: a copy and 8 bytes of position for each.
_SLICE_ITEMS: Final = 1 << 20

# (device, address, bytes, dtype) of a tensor's memory.
Place = tuple[str, int, int, torch.dtype]


class LiveTensors:
    """A layout's tensors where they live. Tied ones are read under each name, written under one.

    Args:
        tensors: by canonical name. One that the layout lacks must share the memory of one that it
            has (a tied head that the checkpoint doesn't hold).
    Raises:
        LayoutChanged: a tensor is missing, unknown, or of another dtype or shape.
        MapUnproven: not contiguous, or two tensors share a part of their memory.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
        held = {t.name: tensors[t.name] for t in layout.tensors if t.name in tensors}
        layout.require_equal(layout_of_tensors(held), what="the module")
        self.layout = layout
        self.places = places_of(tensors)
        self._flat = {name: _flat(name, tensor) for name, tensor in held.items()}
        self.tied_to = _ties(self.places, tuple(held))

    def read(self, frame: FrameSpec, positions: Positions) -> Bits:
        """Live bits at frame-local positions, copied to the host: unsigned [count]."""
        bits = np.empty(positions.size, UNSIGNED[frame.item_bytes])
        for tensor, rows, items in by_tensor(frame, self.layout, positions):
            bits[rows] = gather_at(self._flat[tensor.name], items)
        return bits

    def write(self, frame: FrameSpec, positions: Positions, bits: Bits) -> None:
        """Sets the bits at frame-local positions. Doing it twice is doing it once."""
        for tensor, rows, items in by_tensor(frame, self.layout, positions):
            if tensor.name not in self.tied_to:
                scatter_at(self._flat[tensor.name], items, bits[rows])

    def replace(self, weights: Weights) -> None:
        """Writes every item of other weights of this layout."""
        for tensor in self.layout.tensors:
            flat = self._flat[tensor.name]
            bits = weights.bits(tensor.name)
            for start in range(0, tensor.items, _SLICE_ITEMS):
                part = bits[start : start + _SLICE_ITEMS]
                positions = np.arange(start, start + part.size, dtype=np.int64)
                scatter_at(flat, positions, np.ascontiguousarray(part))

    def fingerprint(self) -> Fingerprint:
        """A full pass over every word of the layout."""
        total = ZERO
        for tensor, word in zip(self.layout.tensors, self.layout.starts, strict=False):
            if tensor.items:
                width = words_per_item(tensor.item_bytes)
                flat = self._flat[tensor.name]
                total += fingerprint_slab(flat, 0, [tensor.items], [1], word, [width])
        return total

    def require_ties_kept(self, frames: Sequence[StagedFrame]) -> None:
        """Refuses a move that would give two names of one memory different bits.

        Raises:
            EngineRefused: the version unties what the module ties.
        """
        for name, owner in self.tied_to.items():
            mine, owners = self._changes(frames, name), self._changes(frames, owner)
            if not all(map(np.array_equal, mine, owners)):
                raise EngineRefused(
                    f"the version changes {name!r} and {owner!r} differently, "
                    "but the module holds both in one memory",
                    remedy="untie them in the module, or follow with a reload",
                )

    def _changes(
        self, frames: Sequence[StagedFrame], name: str
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Items of a tensor that change, in increasing order, and their differences."""
        items, differences = [np.empty(0, np.int64)], []
        for frame in frames:
            delta = frame.delta
            for tensor, rows, changed in by_tensor(frame.spec, self.layout, delta.positions):
                if tensor.name == name:
                    items.append(np.asarray(changed, np.int64))
                    differences.append(delta.differences[rows])
        order = np.argsort(every := np.concatenate(items), kind="stable")
        return every[order], np.concatenate(differences)[order] if differences else every


def places_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Place]:
    """Where each tensor's memory is: equal places are one memory."""
    return {
        name: (str(t.device), t.data_ptr(), t.numel() * t.element_size(), t.dtype)
        for name, t in tensors.items()
    }


def _flat(name: str, tensor: torch.Tensor) -> torch.Tensor:
    try:
        return integer_view(tensor)
    except UsageError as error:
        raise MapUnproven(
            f"{name!r} can't be changed in place: {error.message}",
            remedy="make it contiguous before attaching",
        ) from error


def _ties(places: Mapping[str, Place], held: Sequence[str]) -> dict[str, str]:
    """Held names whose memory belongs to another held name → that one.

    Raises:
        MapUnproven: memory shared in part, or as another dtype.
        LayoutChanged: a tensor outside the layout has memory of its own.
    """
    owners: dict[Place, str] = {}
    tied: dict[str, str] = {}
    for name in held:
        if places[name][2]:
            owner = owners.setdefault(places[name], name)
            if owner != name:
                tied[name] = owner
    ordered = sorted((place[:3], name) for place, name in owners.items())
    for (place, name), (next_place, other) in itertools.pairwise(ordered):
        device, at, size = place
        if device == next_place[0] and at + size > next_place[1]:
            raise MapUnproven(f"{name!r} and {other!r} share a part of their memory")
    extra = [n for n, place in places.items() if n not in held and place[2] and place not in owners]
    if extra:
        raise LayoutChanged(
            f"the module holds tensors that the layout lacks: {', '.join(sorted(extra)[:8])}",
            remedy="pass the engine only the tensors that the policy has",
        )
    return tied
