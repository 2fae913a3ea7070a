"""The Detector port: how a trainer knows the bits that it had before.

A publish is `capture`: what changed since the last capture, as frame deltas, with a fingerprint of
what is there now. Adapters differ in what they keep for it: `SnapshotDetector` keeps a copy.
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
    """Finds the changes. Called on the training thread only, while the weights stand still."""

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
        """What changed since the last capture. If it raises, the next one still finds it all.

        Raises:
            FingerprintMismatch: what was read now isn't the kept state plus the changes found.
        """
        ...

    @property
    def captured(self) -> Weights:
        """The weights as of the last capture or attach, until the next one: what anchors hold."""
        ...
