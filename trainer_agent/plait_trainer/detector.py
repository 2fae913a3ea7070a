"""The Detector port: how a trainer knows the bits that it had before.

A publish is `capture`, which finds what changed, and `keep`, which makes what was found the state
that the next capture starts from: so a capture that nobody took over is simply made again. Adapters
differ in what they keep: `SnapshotDetector` keeps a copy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from plait.codec.algebra import FrameDelta
from plait.cut import Cut
from plait.fingerprint import Fingerprint
from plait.layout import Layout
from plait.manifest import Proof
from plait.weights import Weights
from plait_trainer.live import LiveTensor

LiveTensors = Mapping[str, LiveTensor]


@dataclass(frozen=True, eq=False)
class Capture:
    """What one capture found.

    Attributes:
        deltas: of the frames that changed, by their number in the cut.
        fingerprint: of the whole weights now.
        proof: how that fingerprint is known.
    """

    deltas: Mapping[int, FrameDelta]
    fingerprint: Fingerprint
    proof: Proof


class Detector(Protocol):
    """Finds the changes. `attach` and `capture` are called on the training thread, while the
    weights stand still."""

    def attach(
        self,
        live: LiveTensors,
        layout: Layout,
        cut: Cut,
        *,
        base: Weights | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Fingerprint:
        """Take the present weights as the state that the next capture starts from.

        May be called again, and forgets the earlier state.

        Args:
            live: every tensor of the layout, by name.
            cut: frames of the deltas to come; checked against the layout.
            base: start from these bits of the same layout instead of the live ones.
            optimizer: whose steps change the weights, where the detector uses its state.
        Returns:
            Fingerprint of that state, by a full pass.
        """
        ...

    def capture(self, live: LiveTensors) -> Capture:
        """What changed since the kept state, which stays as it is.

        Raises:
            FingerprintMismatch: what was read now isn't the kept state plus the changes found.
        """
        ...

    def keep(self, capture: Capture) -> None:
        """Take over the last capture: the next one starts from there.

        Called once for a capture, on a thread that Ctrl-C can't interrupt; it doesn't read the live
        weights. Whatever could fail has failed in `capture`.
        """
        ...

    @property
    def captured(self) -> Weights:
        """The weights as of the last `keep` or `attach`, until the next one: what anchors hold."""
        ...
