"""Which detector: by name, or chosen when a publisher attaches, saying why."""

import logging
from collections.abc import Callable, Mapping
from typing import Final, Literal

import torch

from plait.errors import PublishError, UsageError
from plait.fingerprint import Fingerprint
from plait.weights import Weights
from plait_trainer.detector import Capture, Detector, LiveTensors, ReadBack
from plait_trainer.optimized import find_places, refusal, unwrapped_optimizer
from plait_trainer.reconstruction import ReconstructionDetector
from plait_trainer.share import Share
from plait_trainer.snapshot import SnapshotDetector

logger = logging.getLogger("plait.trainer")

DetectorName = Literal["auto", "snapshot", "reconstruction"]


class AutoDetector:
    """Reconstruction where most of what is published belongs to an Adam in FP32, else a snapshot.

    Attributes:
        chosen: what the last attach chose.
        why: in words.
    """

    def __init__(self) -> None:
        self.chosen: Detector | None = None
        self.why = ""

    @property
    def keeps_copy(self) -> bool:
        return self._held().keeps_copy

    @property
    def captured(self) -> Weights:
        return self._held().captured

    def attach(
        self,
        live: LiveTensors,
        share: Share,
        *,
        base: Weights | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        read_back: ReadBack | None = None,
    ) -> Fingerprint:
        self.close()
        reason = why_not_reconstruction(live, share, optimizer)
        self.chosen = ReconstructionDetector() if reason is None else SnapshotDetector()
        name = "reconstruction" if reason is None else "snapshot"
        self.why = reason or "the optimizer's own state tells the weights before each step"
        logger.info("detector: %s, because %s", name, self.why)
        return self.chosen.attach(live, share, base=base, optimizer=optimizer, read_back=read_back)

    def capture(self, live: LiveTensors) -> Capture:
        return self._held().capture(live)

    def keep(self, capture: Capture) -> None:
        self._held().keep(capture)

    def close(self) -> None:
        if self.chosen is not None:
            self.chosen.close()

    def _held(self) -> Detector:
        if self.chosen is None:
            raise PublishError("the detector isn't attached", remedy="call attach() first")
        return self.chosen


# What a detector does; a protocol's own check would ask for its properties, too.
_DOES: Final = ("attach", "capture", "keep", "close")

_BY_NAME: Final[Mapping[str, Callable[[], Detector]]] = {
    "auto": AutoDetector,
    "reconstruction": ReconstructionDetector,
    "snapshot": SnapshotDetector,
}


def detector_of(detector: Detector | DetectorName) -> Detector:
    """A detector itself, or a new one by name.

    Raises:
        UsageError: no such name, or something else.
    """
    if not isinstance(detector, str):
        if isinstance(detector, type) or not all(
            callable(getattr(detector, n, None)) for n in _DOES
        ):
            raise UsageError(
                f"detector is {detector!r:.80}; expected a detector, or one of "
                f"{', '.join(_BY_NAME)}"
            )
        return detector
    if detector not in _BY_NAME:
        raise UsageError(f"no detector {detector!r}; expected one of {', '.join(_BY_NAME)}")
    return _BY_NAME[detector]()


def why_not_reconstruction(
    live: LiveTensors, share: Share, optimizer: torch.optim.Optimizer | None
) -> str | None:
    """Why a copy is the better way to know the old bits; None if it isn't."""
    optimizer = unwrapped_optimizer(optimizer)
    if optimizer is None:
        return "no optimizer was given"
    if (reason := refusal(optimizer)) is not None:
        return reason
    places = find_places(live, optimizer)
    recovered = sum(t.nbytes for t in share.local.tensors if t.name in places)
    if 2 * recovered < share.local.dense_bytes:
        return (
            f"only {recovered} of {share.local.dense_bytes} bytes are FP32 parameters of the "
            "optimizer that are rounded when they are published"
        )
    return None
