"""The model under publication: looked at, proven and watched, on every process alike."""

from dataclasses import dataclass

import torch

from plait.errors import FingerprintMismatch, PublishError, UsageError
from plait.fingerprint import ZERO, Fingerprint
from plait.grain import Grain
from plait.weights import Weights
from plait_trainer.detector import Capture, Detector, ReadBack
from plait_trainer.held import Held
from plait_trainer.live import TensorSource
from plait_trainer.peers import Peers
from plait_trainer.share import Share, fingerprint_live, fingerprint_share, local_weights
from plait_trainer.sharing import Division, share_out


@dataclass(frozen=True, eq=False)
class Proven:
    """Weights whose fingerprint is known by a full pass.

    Attributes:
        held: what this process holds of the model.
        division: who publishes what.
        base: the weights, of the share's local layout, if they aren't the live ones.
        part: fingerprint of this process's share of them.
        fingerprint: of all shares.
    """

    held: Held
    division: Division
    base: Weights | None
    part: Fingerprint
    fingerprint: Fingerprint


class TrackedModel:
    """A model, and the detector that knows what changed in it.

    Attributes:
        keeps_copies: whether `detector.captured` outlives the next step on every process.

    Args:
        read_back: gives a detector the kept state of some tensors.
    """

    def __init__(
        self,
        source: TensorSource,
        detector: Detector,
        optimizer: torch.optim.Optimizer | None,
        *,
        peers: Peers,
        grain: Grain,
        read_back: ReadBack,
    ) -> None:
        self.detector = detector
        self._source, self._optimizer = source, optimizer
        self._peers, self._grain, self._read_back = peers, grain, read_back
        self._start: Proven | None = None
        self.keeps_copies = True

    @property
    def share(self) -> Share:
        """What this process publishes of a delta."""
        return self._attached().division.deltas

    def prove(self, base: Weights | None) -> Proven:
        """What the processes hold together. Called on all of them.

        Args:
            base: prove these weights, of the whole layout, instead of the live ones.
        Raises:
            PublishError: their parts don't make up a model; or one of them can't read its own.
            UsageError: there is nothing in it.
        """
        looks: list[Held] = []

        def look() -> tuple[object, ...]:
            looks.append(Held.of(self._source.tensors()))
            return looks[0].blocks

        blocks = self._peers.agree("look at the model", look)
        division = share_out(blocks, rank=self._peers.rank, grain=self._grain)  # type: ignore[arg-type]
        if not division.layout.tensors:
            raise UsageError(
                "the model has no tensors to publish",
                remedy="publish a module with parameters or persistent buffers, or named tensors",
            )
        held, share = looks[0], division.deltas
        local: list[Weights] = []

        def part() -> Fingerprint:
            if base is None:
                return fingerprint_live(share, held.live)
            local.append(local_weights(share, base))
            return fingerprint_share(share, local[0])

        parts = self._peers.agree("prove the weights", part)
        rank = self._peers.rank
        return Proven(held, division, local[0] if local else None, parts[rank], sum(parts, ZERO))

    def start_from(self, proven: Proven) -> None:
        """Forget the earlier state, and watch for changes from this one on. Called on all.

        Raises:
            FingerprintMismatch: the weights aren't those that were proven.
            PublishError: the detector can't tell what the optimizer changes; or another process's.
        """
        self._start = None

        def attach() -> bool:
            kept = self._attach(proven.held, proven.division.deltas, proven.base)
            if kept != proven.part:
                raise FingerprintMismatch(
                    f"the weights to start from had the fingerprint {proven.part} when they were "
                    f"proven, and have {kept}",
                    remedy="attach between two steps",
                )
            return self.detector.keeps_copy

        self.keeps_copies = all(self._peers.agree("attach", attach))
        self._start = proven

    def capture(self, *, begins: bool, external: bool) -> Capture:
        """What changed since the kept state, which stays as it is. Local to this process.

        Args:
            begins: nothing refers to the kept state yet.
            external: and others hold it already, so it must not have changed.
        Raises:
            LayoutChanged: names, dtypes, shapes or shards differ from those that it attached with.
            UsageError: changed since it attached, and external.
        """
        start, now = self._attached(), Held.of(self._source.tensors())
        start.held.require_same(now)
        share = start.division.deltas
        live = now.published(share)
        if external and fingerprint_live(share, live) != start.part:
            raise UsageError(
                "an external anchor stands for weights that everybody holds, and these have "
                "changed since the publisher attached",
                remedy="publish once before the first step, or without external",
            )
        if begins and not self.detector.keeps_copy:
            # Take what is there now: the old state can't be told, and needn't be.
            self._attach(now, share, None)
        return self.detector.capture(live)

    def _attach(self, held: Held, share: Share, base: Weights | None) -> Fingerprint:
        return self.detector.attach(
            held.published(share), share, base=base, optimizer=self._optimizer,
            read_back=self._read_back,
        )  # fmt: skip

    def _attached(self) -> Proven:
        if self._start is None:
            raise PublishError("the publisher isn't attached", remedy="call attach() first")
        return self._start
