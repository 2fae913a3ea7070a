"""The Publisher: attach to a model, publish every step, lose nothing.

`publish()` captures what changed and returns; encoding, upload and commit follow on one background
thread, in order, behind a bounded queue.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any, Self

import torch

from plait.errors import (
    BaseMismatch,
    FingerprintMismatch,
    PlaitError,
    PublisherClosed,
    PublishError,
    UsageError,
)
from plait.fingerprint import ZERO, Fingerprint
from plait.grain import Grain, kv_heads_of
from plait.layout import Layout
from plait.manifest import check_metadata
from plait.store import Store
from plait.weights import Weights, fingerprint_weights
from plait.wire import VersionDocument
from plait_client.registry import RegistryClient
from plait_trainer.committer import Committer, Line
from plait_trainer.detector import Capture, Detector, LiveTensors
from plait_trainer.dtypes import DtypeRule
from plait_trainer.future import PublishFuture, PublishMetrics
from plait_trainer.live import TensorSource, fingerprint_live, layout_of
from plait_trainer.outbox import Outbox, Publish, WhenFull
from plait_trainer.read_back import read_back
from plait_trainer.share import Share
from plait_trainer.snapshot import SnapshotDetector
from plait_trainer.sources import Converter, State, source_of
from plait_trainer.standing import Standing, find_channel, find_standing
from plait_trainer.state import known_version, state_of
from plait_trainer.worker import Worker

logger = logging.getLogger("plait.trainer")


class Publisher:
    """Publishes a model's weights as versions of a policy.

    Args:
        model: a module; or named tensors, or a function that gives them anew at each publish.
        optimizer: whose steps change the weights, for detectors that use its state.
        client: of the registry.
        policy, channel: what the versions are committed to; both are created if need be.
        dtype: that floating-point parameters are published in, rounded as `Tensor.to` rounds; None:
            as they are. Buffers, and parameters that the model keeps in FP32, stay as they are.
        dtypes: exceptions, name pattern → dtype, or None for as it is.
        names: from the module's state dict to the checkpoint's, by views; by default what
            `save_pretrained` would write.
        ties: alias → name in the checkpoint, beside those that the model declares.
        queue_size: captured publishes that may wait for the worker.
        when_full: `wait` for room, or `merge` into the last one that waits.
        new_anchor: start a new line if the policy doesn't know these weights.
        external: the first anchor uploads no bytes: everybody holds its weights already.
        side_files: folder whose files (config, tokenizer) travel with anchors.
        actor: who publishes, for the channel's history.
        patience: seconds that a publish waits for a registry that is away before it fails.
        store: the registry's object store, if this host may write to it.
        grain: shares that an engine's ranks can fetch apart; 1 for none.
        kv_heads: the model's key-value heads, for the grain; by default what its config says.
        detector: how changes are found; by default a snapshot in CPU memory.
        attach: prove at once what the model holds. Otherwise call `attach`, `rebase` or
            `load_state_dict` once its weights are loaded.

    Raises:
        PlaitError: as `attach` does.
    """

    def __init__(
        self,
        model: torch.nn.Module | State | Callable[[], State] | TensorSource,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        client: RegistryClient,
        policy: str,
        channel: str = "main",
        dtype: str | None = "BF16",
        dtypes: Mapping[str, str | None] | None = None,
        names: Converter | None = None,
        ties: Mapping[str, str] | None = None,
        queue_size: int = 2,
        when_full: WhenFull = "wait",
        new_anchor: bool = False,
        external: bool = False,
        side_files: Path | str | None = None,
        actor: str = "",
        patience: float = 600.0,
        store: Store | None = None,
        grain: int = 1,
        kv_heads: int | None = None,
        detector: Detector | None = None,
        attach: bool = True,
    ) -> None:
        self._source = source_of(model, DtypeRule(dtype, dtypes or {}), ties or {}, names)
        self._optimizer, self._client = optimizer, client
        self._policy, self._channel = policy, channel
        self._new_anchor, self._external = new_anchor, external
        self._side_files = None if side_files is None else Path(side_files)
        self._actor, self._patience, self._store = actor, patience, store
        self._grain = Grain(grain, _kv_heads(model) if kv_heads is None else kv_heads)
        self._detector: Detector = SnapshotDetector() if detector is None else detector
        self._outbox = Outbox(queue_size, when_full)
        self._worker, self._keeper = Worker("plait-publish"), Worker("plait-keep")
        # One caller at a time: a capture and its place in the queue belong together.
        self._calling = threading.RLock()
        self._committer: Committer | None = None
        self._attached_at = ZERO
        self._share: Share | None = None
        self._last: PublishFuture | None = None
        self._closed = False
        self._stopping = threading.Event()
        if attach:
            self.attach()

    # Where it stands ----------------------------------------------------------------------------

    def attach(self, *, base: Weights | None = None) -> None:
        """Prove what the trainer holds, and continue the line that it belongs to.

        Args:
            base: weights of a committed version, if the model has been trained on from there: the
                next publish is the difference.
        Raises:
            HeadMoved: these weights are a version, but not the channel's head.
            UnknownBase: they are none of the policy's versions, and new_anchor wasn't asked for.
            LayoutChanged: nor can they be.
            RegistryUnavailable: nobody to ask.
        """
        with self._calling:
            self._drain()
            live, layout = self._live()
            fingerprint = _fingerprint_of(live, layout, base)
            standing = find_standing(
                self._client, self._policy, self._channel,
                layout=layout, fingerprint=fingerprint, new_anchor=self._new_anchor,
            )  # fmt: skip
            self._take_up(live, layout, base, fingerprint, standing)
            logger.info("%s attached: %s", self._policy, standing.in_words(fingerprint))

    def rebase(self, to: int | str | None = None, *, base: Weights | None = None) -> None:
        """Continue from a version by name: after a rollback, or when somebody else moved the head.

        The weights must prove equal to it. Changes that were captured and not committed are kept if
        they start from that very version.

        Args:
            to: any REF; by default the channel's head. The next commit moves the channel from
                wherever it is now to a child of this version.
            base: that version's weights, if the model has been trained on from them.
        Raises:
            BaseMismatch: neither the model nor the last committed state is that version.
        """
        with self._calling:
            self._drain()
            if self._committer is not None:
                self._committer.find_out()
            head = find_channel(self._client, self._policy, self._channel)
            ref = str(to) if to is not None else self._channel
            target = self._client.version(self._policy, ref)
            standing = Standing.beside(target, head)
            if base is None and self._committer is not None and self._stands_on(target):
                self._committer.stand(standing, keep_pending=True)
                return
            live, layout = self._live()
            held = _fingerprint_of(live, layout, base)
            if (layout.digest, str(held)) != (target.layout_digest, target.fingerprint):
                raise BaseMismatch(
                    f"the weights at hand (fingerprint {held}) are not version {target.seq} "
                    f"({target.fingerprint})",
                    remedy=f"load version {target.seq} into the model, or pass its weights as "
                    "base; or name the version that this trainer last committed",
                )
            self._take_up(live, layout, base, held, standing)

    @property
    def version(self) -> VersionDocument | None:
        """The last committed version, whose weights the next delta starts from."""
        return None if self._committer is None else self._committer.standing.parent

    def state_dict(self) -> dict[str, Any]:
        """What the trainer's own checkpoint should carry: names and identities, no weights."""
        return state_of(self._policy, self._channel, self.version)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the trainer that wrote the checkpoint, once its weights are loaded.

        Content decides: the checkpoint's numbers are compared with the registry's, not believed.

        Raises:
            UsageError: another policy's or channel's state, or none at all.
            NotFound: the registry has never had that version: it is another one, or was restored.
            PlaitError: as `attach` does.
        """
        digest = known_version(self._client, state, self._policy, self._channel)
        self.attach()
        if digest is not None and (self.version is None or self.version.version_digest != digest):
            logger.warning(
                "the checkpoint of %s was written at version %s, and its weights are version %s",
                self._policy, state.get("seq"), self.version and self.version.seq,
            )  # fmt: skip

    # Publishing ---------------------------------------------------------------------------------

    def publish(self, metadata: Mapping[str, Any] | None = None) -> PublishFuture:
        """Capture what changed since the last publish, and have it committed behind this thread.

        Only the capture happens here. It waits for room in the queue (`when_full="wait"`), and
        while the line's first anchor, which is read from the snapshot, is under way; with a
        detector that keeps no copy it waits for that anchor itself. Ctrl-C finds a publish either
        not begun or on its way, never in between.

        Args:
            metadata: training facts (step, learning rate…) for the version record.
        Raises:
            HeadMoved: the channel isn't where this trainer left it; see `rebase`.
            LayoutChanged: names, dtypes or shapes differ from those that it attached with.
            PublishError: not attached, or declared ties are broken.
            PublisherClosed, DocumentInvalid, LimitExceeded.
            In each case nothing was captured: the next publish finds the same changes and more.
        """
        with self._calling:
            committer = self._standing_committer()
            facts = check_metadata(metadata or {})
            self._await_anchor(committer)
            self._outbox.await_room()
            committer.refuse_if_fenced()
            started = time.perf_counter()
            live, layout = self._live()
            # Compared by its rows first: the digest of 10^5 tensors takes half a second.
            if layout != committer.line.layout:
                committer.line.layout.require_equal(layout, what="the model")
            self._check_external(committer, live, layout)
            begins = committer.standing.parent is None
            if begins and not self._detector.keeps_copy and not committer.is_in_doubt:
                # Nothing refers to the kept state yet: take what is there now.
                self._attach_detector(live, self._share)
            capture = self._detector.capture(live)
            future = self._keeper.run(lambda: self._hand_over(committer, capture, facts, started))
            if begins and not self._detector.keeps_copy:
                # The anchor is read from the live weights, which the next step changes.
                wait([future])
            return future

    def flush(self) -> None:
        """Waits until every publish is committed or has failed.

        Raises:
            PlaitError: the last one's, if it failed: its changes are not committed.
        """
        with self._calling:
            self._drain()
            if self._last is not None:
                self._last.result()

    def close(self, *, abandon: bool = False) -> None:
        """Flushes, and stops. Closing twice is allowed.

        Args:
            abandon: don't wait any longer for a registry that is away.
        Raises:
            PlaitError: as `flush` does; it is closed all the same.
        """
        if abandon:
            self._stopping.set()
        self._outbox.close()
        with self._calling:
            if self._closed:
                return
            self._closed = True
            self._keeper.stop()
            self._worker.stop()
            self._detector.close()
            if self._last is not None:
                self._last.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except PlaitError:
            # The body's own error is the one to be told; this one is in the log.
            if error is None:
                raise

    # --------------------------------------------------------------------------------------------

    def _hand_over(
        self, committer: Committer, capture: Capture, facts: Mapping[str, Any], started: float
    ) -> PublishFuture:
        """The detector moves on, and what it found is in the queue: both or neither."""
        self._detector.keep(capture)
        metrics = PublishMetrics(detect_seconds=time.perf_counter() - started)
        future = PublishFuture(metrics)
        publish = Publish(
            capture.deltas, capture.fingerprint, capture.proof, facts, metrics, [future]
        )
        self._last = future
        if self._outbox.put(publish):
            self._worker.start(lambda: self._run_next(committer))
        return future

    def _run_next(self, committer: Committer) -> None:
        """On the worker: commits the oldest publish, and settles its futures either way."""
        publish = self._outbox.take()
        try:
            version = committer.commit(publish, lambda: self._detector.captured)
        except BaseException as error:
            logger.error("a publish of %s failed and stays pending: %s", self._policy, error)
            for future in publish.futures:
                future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        logger.info("%s", publish.metrics.line_of(version))
        for future in publish.futures:
            future.set_result(version)

    def _standing_committer(self) -> Committer:
        """Once no interrupted call is still at work."""
        if self._closed:
            raise PublisherClosed("the publisher is closed")
        if self._committer is None:
            raise PublishError("the publisher isn't attached", remedy="call attach() first")
        self._keeper.await_idle()
        self._committer.refuse_if_fenced()
        return self._committer

    def _await_anchor(self, committer: Committer) -> None:
        """Until a line has its first version there is nothing to add changes to, and its anchor is
        encoded from the captured weights themselves: they must not move on meanwhile."""
        if committer.standing.parent is None and self._last is not None:
            wait([self._last])

    def _check_external(self, committer: Committer, live: LiveTensors, layout: Layout) -> None:
        if committer.standing.parent is not None or not self._external:
            return
        if fingerprint_live(layout, live.values()) != self._attached_at:
            raise UsageError(
                "an external anchor stands for weights that everybody holds, and these have "
                "changed since the publisher attached",
                remedy="publish once before the first step, or without external",
            )

    def _live(self) -> tuple[LiveTensors, Layout]:
        tensors = list(self._source.tensors())
        return {tensor.spec.name: tensor for tensor in tensors}, layout_of(tensors)

    def _take_up(
        self, live: LiveTensors, layout: Layout, base: Weights | None,
        proven: Fingerprint, standing: Standing,
    ) -> None:  # fmt: skip
        """Everything is proven: forget the earlier state, and start from this one."""
        cut = self._grain.cut(layout, for_anchor=False)
        self._committer, self._last = None, None
        share = Share.whole(layout, cut)
        kept = self._attach_detector(live, share, base)
        if kept != proven:
            raise FingerprintMismatch(
                f"the weights changed from {proven} to {kept} while the publisher attached",
                remedy="attach between two steps",
            )
        self._attached_at, self._share = proven, share
        line = Line(
            self._policy, self._channel, layout, cut, self._grain,
            external=self._external, side_files=self._side_files, actor=self._actor,
            patience=self._patience, store=self._store,
        )  # fmt: skip
        self._committer = Committer(self._client, line, standing, stopping=self._stopping)

    def _attach_detector(
        self, live: LiveTensors, share: Share | None, base: Weights | None = None
    ) -> Fingerprint:
        assert share is not None
        return self._detector.attach(
            live, share, base=base, optimizer=self._optimizer, read_back=self._read_back
        )

    def _read_back(self, names: Collection[str]) -> Weights:
        """The state of the last publish, for a detector that can't tell it any more."""
        self._drain()
        if self._committer is None or self._share is None:
            raise PublishError("there is no version to read back", remedy="attach again")
        self._committer.find_out()
        parent = self._committer.standing.parent
        if parent is None:
            raise PublishError(
                f"{self._policy!r} has no version yet that {', '.join(sorted(names)[:8])} could "
                "be read back from",
                remedy="attach again",
            )
        pending = self._committer.pending
        return read_back(self._client, parent, self._share, pending, names, store=self._store)

    def _stands_on(self, version: VersionDocument) -> bool:
        parent = self.version
        return parent is not None and (parent.layout_digest, parent.fingerprint) == (
            version.layout_digest,
            version.fingerprint,
        )

    def _drain(self) -> None:
        """Returns once the worker has nothing to do."""
        if not self._closed:
            self._keeper.await_idle()
            self._worker.await_idle()


def _fingerprint_of(live: LiveTensors, layout: Layout, base: Weights | None) -> Fingerprint:
    if base is None:
        return fingerprint_live(layout, live.values())
    layout.require_equal(base.layout, what="the base")
    return fingerprint_weights(base)


def _kv_heads(model: object) -> int | None:
    """What the model's own configuration says, if it is one of transformers."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    fields = None if to_dict is None else to_dict()
    return kv_heads_of(fields) if isinstance(fields, Mapping) else None
