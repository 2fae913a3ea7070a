"""The weights that some changes have led away from, without a copy of them."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.layout import Layout
from plait.weights import Weights
from plait_trainer.deltas import Deltas, changed_items
from plait_trainer.live import LiveTensor
from plait_trainer.share import Share


class EarlierWeights:
    """The live weights of a share, without the changes that led to them.

    Made tensor by tensor when they are asked for; each thread keeps its last one until it asks for
    another. To be used before anything changes the live weights.

    Args:
        changes: from these weights to the live ones, by their frames' numbers in the cut.
    """

    def __init__(self, share: Share, live: Mapping[str, LiveTensor], changes: Deltas) -> None:
        self._share, self._live, self._changes = share, live, changes
        self._parts = {parts[0].piece.tensor.name: parts for parts in share.parts}
        self._own = threading.local()

    @property
    def layout(self) -> Layout:
        return self._share.local

    def bits(self, name: str) -> NDArray[Any]:
        last: tuple[str, NDArray[Any]] | None = getattr(self._own, "last", None)
        if last is None or last[0] != name:
            last = self._own.last = name, self._made(name)
        return last[1]

    def _made(self, name: str) -> NDArray[Any]:
        bits = np.array(self._live[name].bits(0, self.layout[name].items))
        for part in self._parts.get(name, ()):
            delta = self._changes.get(self._share.numbers[part.frame])
            if delta is not None:
                items, rows = changed_items(part.piece, delta)
                bits[items] -= delta.differences[rows]
        return bits


@dataclass(frozen=True, eq=False)
class Runs:
    """One tensor's bits, by runs that are made when they are asked for."""

    weights: Weights
    name: str

    def __getitem__(self, run: slice, /) -> NDArray[Any]:
        return self.weights.bits(self.name)[run]
