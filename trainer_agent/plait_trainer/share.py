"""A process's share of a policy: which tensors, or blocks of tensors, it publishes.

A trainer on one process has all of it. In a group each process holds blocks; their frames, one
process's after the other's, are the cut of the whole. A process works on its *local* layout, whose
tensors are its blocks in their own row-major order; a frame holds the same items in the same order
seen from either side, and only words tell the two apart.
"""

from dataclasses import dataclass

from plait.cut import FrameSpec
from plait.fingerprint import Fingerprint
from plait.grain import SlottedCut
from plait.layout import Layout
from plait.weights import Weights, fingerprint_weights


@dataclass(frozen=True, eq=False)
class Share:
    """What one process publishes.

    Attributes:
        layout: of the whole policy.
        cut: of the whole policy, for deltas.
        local: layout of the blocks held here, under their tensors' names.
        numbers: of the frames in the cut that are published here, increasing.
        local_frames: the same frames, item for item, in words of the local layout.
    """

    layout: Layout
    cut: SlottedCut
    local: Layout
    numbers: tuple[int, ...]
    local_frames: tuple[FrameSpec, ...]

    @classmethod
    def whole(cls, layout: Layout, cut: SlottedCut) -> "Share":
        """All of a policy."""
        frames = cut.cut.frames
        return cls(layout, cut, layout, tuple(range(len(frames))), frames)

    @property
    def is_whole(self) -> bool:
        return self.local is self.layout

    @property
    def frames(self) -> tuple[FrameSpec, ...]:
        """The frames published here, in words of the whole layout."""
        return tuple(self.cut.cut.frames[number] for number in self.numbers)


def fingerprint_share(share: Share, weights: Weights) -> Fingerprint:
    """Fingerprint of weights of the local layout at their words in the whole one: a full pass."""
    share.local.require_equal(weights.layout, what="the share's weights")
    return fingerprint_weights(weights)
