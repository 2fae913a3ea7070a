"""The snapshot detector: a copy of the published bits, in CPU memory. Works with any optimizer.

It covers every published tensor, so frozen ones, buffers and weights changed by hand are compared
like all others. Beyond the copy it holds a block of one tensor at a time, and what changed.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from plait.errors import FingerprintMismatch, PublishError
from plait.fingerprint import ZERO, Fingerprint
from plait.layout import TensorSpec
from plait.weights import UNSIGNED, ArrayWeights, Weights, readable_bits
from plait_trainer.comparing import compare_share, deltas_of
from plait_trainer.deltas import apply_deltas
from plait_trainer.detector import Capture, LiveTensors, ReadBack
from plait_trainer.share import Share, fingerprint_share

# Items copied at once.
_RUN_ITEMS: Final = 1 << 20


@dataclass(eq=False)
class SnapshotDetector:
    """Compares the live bits with a retained copy of the last captured ones.

    Attributes:
        threads: that compare and hash frames at the same time, each holding one frame. More than
            one is for weights in CPU memory: they read outside the caller's device stream.
    """

    threads: int = 1
    _snapshot: ArrayWeights | None = field(default=None, init=False)
    _share: Share | None = field(default=None, init=False)
    _fingerprint: Fingerprint = field(default=ZERO, init=False)

    @property
    def keeps_copy(self) -> bool:
        return True

    def attach(
        self,
        live: LiveTensors,
        share: Share,
        *,
        base: Weights | None = None,
        optimizer: torch.optim.Optimizer | None = None,  # noqa: ARG002 (others use its state)
        read_back: ReadBack | None = None,  # noqa: ARG002 (what it keeps, it can tell)
    ) -> Fingerprint:
        """As the port says.

        Raises:
            LayoutChanged: the base has another layout than the share.
        """
        self.close()  # two copies are never held
        if base is not None:
            share.local.require_equal(base.layout, what="the base")
        arrays: dict[str, NDArray[Any]] = {}
        for tensor in share.local.tensors:
            bits = np.empty(tensor.items, UNSIGNED[tensor.item_bytes])
            for start in range(0, tensor.items, _RUN_ITEMS):
                stop = min(start + _RUN_ITEMS, tensor.items)
                bits[start:stop] = (
                    live[tensor.name].bits(start, stop)
                    if base is None
                    else base.bits(tensor.name)[start:stop]
                )
            arrays[tensor.name] = bits
        snapshot = ArrayWeights(share.local, arrays)
        self._fingerprint = fingerprint_share(share, snapshot)
        self._snapshot, self._share = snapshot, share
        return self._fingerprint

    @property
    def captured(self) -> Weights:
        return self._held()[0]

    def capture(self, live: LiveTensors) -> Capture:
        snapshot, share = self._held()

        def read(tensor: TensorSpec, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
            return (
                readable_bits(snapshot, tensor)[start:stop],
                live[tensor.name].bits(start, stop),
            )

        changes = compare_share(share, read, threads=self.threads)
        now = sum((change.now for change in changes), ZERO)
        reached = sum((change.increment for change in changes), self._fingerprint)
        if reached != now:
            raise FingerprintMismatch(
                f"the weights have the fingerprint {now}, the kept copy and the changes found "
                f"lead to {reached}: something wrote to the copy, or to the weights meanwhile",
                remedy="attach again",
                expected=str(now),
                found=str(reached),
            )
        return Capture(deltas_of(share, changes), now, "full")

    def keep(self, capture: Capture) -> None:
        snapshot, share = self._held()
        apply_deltas(share, snapshot, capture.deltas)
        self._fingerprint = capture.fingerprint

    def close(self) -> None:
        """Let go of the copy. Closing twice is allowed."""
        self._snapshot = self._share = None

    def _held(self) -> tuple[ArrayWeights, Share]:
        if self._snapshot is None or self._share is None:
            raise PublishError("the detector isn't attached", remedy="call attach() first")
        return self._snapshot, self._share
