"""The Detector port: how a trainer knows the bits that it had before.

A publish is `capture`, which finds what changed, and `keep`, which makes what was found the state
that the next capture starts from: so a capture that nobody took over is simply made again. Adapters
differ in what they keep: `SnapshotDetector` keeps a copy.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from plait.codec.algebra import FrameDelta
from plait.fingerprint import Fingerprint
from plait.version_record import Proof
from plait.weights import Weights
from plait_trainer.live import LiveTensor
from plait_trainer.share import Share

LiveTensors = Mapping[str, LiveTensor]

# The kept state of these tensors of the local layout, from what was committed and what is pending.
# Raises a PlaitError where they can't be read back.
ReadBack = Callable[[Collection[str]], Weights]


@dataclass(frozen=True, eq=False)
class Capture:
    """What one capture found.

    Attributes:
        deltas: of the frames that changed, by their number in the whole cut.
        fingerprint: of the share's weights now, at their words in the whole layout.
        proof: how that fingerprint is known.
    """

    deltas: Mapping[int, FrameDelta]
    fingerprint: Fingerprint
    proof: Proof


class Detector(Protocol):
    """Finds the changes. `attach` and `capture` are called on the training thread, while the
    weights stand still."""

    @property
    def keeps_copy(self) -> bool:
        """Whether `captured` outlives the next optimizer step."""
        ...

    def attach(
        self,
        live: LiveTensors,
        share: Share,
        *,
        base: Weights | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        read_back: ReadBack | None = None,
    ) -> Fingerprint:
        """Take the present weights as the state that the next capture starts from.

        May be called again, and forgets the earlier state before anything else.

        Args:
            live: every tensor of the share's local layout, by name.
            base: start from these bits of the local layout instead of the live ones.
            optimizer: whose steps change the weights, where the detector uses its state.
            read_back: gives the kept state anew, where the detector can't tell it any more.
        Returns:
            Fingerprint of that state at its words in the whole layout, by a full pass.
        Raises:
            PublishError: the detector can't tell what such an optimizer changes.
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
        """The weights of the local layout as of the last `keep` or `attach`: what anchors hold.

        They stay until the next `keep`; or, without a copy, until the weights change.
        """
        ...

    def close(self) -> None:
        """Let go of the optimizer, and of what is kept. Closing twice is allowed."""
        ...
