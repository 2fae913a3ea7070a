"""A process's share of a policy: which tensors, or blocks of tensors, it publishes.

A trainer on one process has all of it. In a group each process holds blocks; their frames, one
process's after the other's, are the cut of the whole. A process works on its *local* layout, whose
tensors are its blocks in their own row-major order; a frame holds the same items in the same order
seen from either side, and only words tell the two apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from plait.codec.stretches import Part
from plait.codec.sweep import parts_by_tensor
from plait.cut import FrameSpec
from plait.fingerprint import ZERO, Fingerprint
from plait.grain import SlottedCut
from plait.layout import Layout, TensorSpec
from plait.weights import ArrayWeights, Weights, checked_bits, fingerprint_weights, readable_bits
from plait.workers import shared
from plait_trainer.blocks import BlockSpec, PlacedBlock
from plait_trainer.live import LiveTensor

# Items hashed by one thread at a time.
_PASS_ITEMS: Final = 1 << 22


@dataclass(frozen=True, eq=False)
class Share:
    """What one process publishes.

    Attributes:
        layout: of the whole policy.
        cut: of the whole policy.
        local: layout of the blocks published here, under their tensors' names.
        numbers: of the frames in the cut that are published here, increasing.
        local_frames: the same frames, item for item, in words of the local layout.
        blocks: by name, of the tensors that aren't published whole.
    """

    layout: Layout
    cut: SlottedCut
    local: Layout
    numbers: tuple[int, ...]
    local_frames: tuple[FrameSpec, ...]
    blocks: Mapping[str, BlockSpec] = field(default_factory=dict)

    @classmethod
    def whole(cls, layout: Layout, cut: SlottedCut) -> "Share":
        """All of a policy."""
        frames = cut.cut.frames
        return cls(layout, cut, layout, tuple(range(len(frames))), frames)

    @property
    def is_whole(self) -> bool:
        return self.local is self.layout

    @cached_property
    def parts(self) -> list[list[Part]]:
        """The local frames' pieces, one list for each tensor: the same for every capture."""
        return parts_by_tensor(self.local_frames, self.local)

    def part(self, name: str, bits: NDArray[Any]) -> NDArray[Any]:
        """What of a whole tensor's bits lies in its block here; a copy, unless it is all of them.

        Args:
            bits: 1-d.
        """
        block = self.blocks.get(name)
        if block is None:
            return bits
        return np.ascontiguousarray(bits.reshape(block.whole.shape)[block.region]).reshape(-1)

    def place(self, name: str) -> PlacedBlock:
        """Where a tensor of the local layout, which isn't empty, has its words in the whole one."""
        block = self.blocks.get(name) or BlockSpec.all_of(self.layout[name])
        return PlacedBlock(block, self.layout.start_of(name))


def fingerprint_share(share: Share, weights: Weights) -> Fingerprint:
    """Fingerprint of weights of the local layout at their words in the whole one: a full pass."""
    share.local.require_equal(weights.layout, what="the share's weights")
    if share.is_whole:
        return fingerprint_weights(weights)

    def of_run(run: tuple[TensorSpec, PlacedBlock, int]) -> Fingerprint:
        spec, place, start = run
        return place.fingerprint(readable_bits(weights, spec)[start : start + _PASS_ITEMS], start)

    runs = [
        (spec, share.place(spec.name), start)
        for spec in share.local.tensors if spec.items
        for start in range(0, spec.items, _PASS_ITEMS)
    ]  # fmt: skip
    return sum(shared().map(of_run, runs), ZERO)


def fingerprint_live(share: Share, live: Mapping[str, LiveTensor]) -> Fingerprint:
    """Fingerprint of the live weights of a share: a full pass that keeps nothing."""
    total = ZERO
    for spec in share.local.tensors:
        if spec.items:
            place = share.place(spec.name)
            for start in range(0, spec.items, _PASS_ITEMS):
                stop = min(start + _PASS_ITEMS, spec.items)
                total += place.fingerprint(live[spec.name].bits(start, stop), start)
    return total


def local_weights(share: Share, whole: Weights) -> Weights:
    """The share's part of whole weights: a copy, except of tensors that are published whole.

    Raises:
        LayoutChanged: they are weights of another layout.
    """
    share.layout.require_equal(whole.layout, what="the base")
    if share.is_whole:
        return whole
    parts = {
        spec.name: share.part(spec.name, checked_bits(whole, share.layout[spec.name]))
        for spec in share.local.tensors
    }
    return ArrayWeights(share.local, parts)
