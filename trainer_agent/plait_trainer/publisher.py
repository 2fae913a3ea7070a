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
from typing import Any, Final, Self

import torch

from plait.errors import BaseMismatch, PlaitError, PublisherClosed, PublishError, UsageError
from plait.grain import Grain, kv_heads_of
from plait.store import Store
from plait.version_record import check_metadata
from plait.weights import Weights
from plait.wire import VersionDocument
from plait_client.failpoints import failpoint
from plait_client.registry import RegistryClient
from plait_trainer.choice import DetectorName, detector_of
from plait_trainer.committer import Committer
from plait_trainer.detector import Capture, Detector
from plait_trainer.dtypes import DtypeRule
from plait_trainer.future import PublishFuture, PublishMetrics
from plait_trainer.group import Outcome
from plait_trainer.lanes import Choice, Lanes, chosen_group
from plait_trainer.line import Line
from plait_trainer.live import TensorSource
from plait_trainer.outbox import Outbox, Publish, WhenFull
from plait_trainer.patience import Patience
from plait_trainer.peers import Peers
from plait_trainer.read_back import read_back
from plait_trainer.sources import Converter, State, source_of
from plait_trainer.standing import Standing, find_channel, find_standing
from plait_trainer.state import known_version, state_of
from plait_trainer.tracking import Proven, TrackedModel
from plait_trainer.worker import Worker

# What a process that is leaving waits for others who may not come.
_LEAVE_SECONDS: Final = 10.0

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
        detector: how changes are found: one, or the name of one; by default a snapshot in CPU
            memory. `auto` chooses, and says why in the log.
        group: the processes that publish this model together, each constructing a publisher with
            the same arguments; True for all of torch's, False for this one alone. By default all of
            them if the model is sharded over them or copied by DDP.
        peer_timeout: seconds that one of them waits for another at the same step.
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
        detector: Detector | DetectorName = "snapshot",
        group: Choice = None,
        peer_timeout: float = 1800.0,
        attach: bool = True,
    ) -> None:
        source = source_of(model, DtypeRule(dtype, dtypes or {}), ties or {}, names)
        cuts = Grain(grain, _kv_heads(model) if kv_heads is None else kv_heads)
        self._client = client
        self._policy, self._channel = policy, channel
        self._new_anchor, self._external = new_anchor, external
        self._side_files = None if side_files is None else Path(side_files)
        self._actor, self._store = actor, store
        self._patience = Patience(patience)
        self._outbox = Outbox(queue_size, when_full)

        def open_lanes() -> Lanes:
            chosen = chosen_group(group, model, source.tensors)
            _refuse_in_a_group(chosen, grain=grain, when_full=when_full)
            return Lanes.open(chosen, timeout=peer_timeout, patience=patience)

        self._peers = Peers(open_lanes)
        self._model = TrackedModel(
            source, detector_of(detector), optimizer,
            peers=self._peers, grain=cuts, read_back=self._read_back,
        )  # fmt: skip
        self._worker = Worker("plait-publish")
        # One caller at a time: a capture and its place in the queue belong together.
        self._calling = threading.RLock()
        self._committer: Committer | None = None
        self._last: PublishFuture | None = None
        self._closed = False
        if attach:
            try:
                self.attach()
            except BaseException:
                self._leave(within=_LEAVE_SECONDS)
                raise

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
            self._peers.open()
            proven = self._model.prove(base)
            standing = self._peers.lead(
                "find the standing",
                lambda: find_standing(
                    self._client, self._policy, self._channel, layout=proven.division.layout,
                    fingerprint=proven.fingerprint, new_anchor=self._new_anchor,
                ),
            )  # fmt: skip
            self._take_up(proven, standing)
            logger.info("%s attached: %s", self._policy, standing.in_words(proven.fingerprint))

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
            self._peers.open()
            if (committer := self._committer) is not None:
                self._peers.keeper.run(committer.find_out)
            target, standing = self._peers.lead("find the version", lambda: self._beside(to))
            if base is None and committer is not None and self._stands_on(target):
                committer.stand(standing, keep_pending=True)
                return
            proven = self._model.prove(base)
            held = (proven.division.layout.digest, str(proven.fingerprint))
            if held != (target.layout_digest, target.fingerprint):
                raise BaseMismatch(
                    f"the weights at hand (fingerprint {proven.fingerprint}) are not version "
                    f"{target.seq} ({target.fingerprint})",
                    remedy=f"load version {target.seq} into the model, or pass its weights as "
                    "base; or name the version that this trainer last committed",
                )
            self._take_up(proven, standing)

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
        self._peers.open()
        digest = self._peers.lead(
            "find the checkpoint's version",
            lambda: known_version(self._client, state, self._policy, self._channel),
        )
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
            copies = self._model.keeps_copies
            begins = self._await_anchor(committer)
            if begins and not copies and committer.is_in_doubt:
                # What an unanswered anchor held can't be told any more: is it there?
                self._peers.keeper.run(committer.find_out)
            mine = self._peers.attempt("capture", lambda: self._capture(committer, metadata))
            future = self._peers.keeper.run(lambda: self._hand_over(committer, mine))
            if begins and not copies:
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
        self._close(abandon=abandon, within=_LEAVE_SECONDS if abandon else None)

    def _close(self, *, abandon: bool, within: float | None) -> None:
        if abandon:
            self._patience.stopping.set()
        self._outbox.close()
        with self._calling:
            if self._closed:
                return
            self._closed = True
            self._leave(within=within)
            if self._last is not None:
                self._last.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            # After an error the other processes may be anywhere.
            self._close(abandon=False, within=None if error is None else _LEAVE_SECONDS)
        except PlaitError:
            # The body's own error is the one to be told; this one is in the log.
            if error is None:
                raise

    # --------------------------------------------------------------------------------------------

    def _capture(
        self, committer: Committer, metadata: Mapping[str, Any] | None
    ) -> tuple[Capture, Mapping[str, Any], float]:
        """What changed, the checked metadata, and the seconds of the capture itself."""
        committer.refuse_if_fenced()
        facts = check_metadata(metadata or {})
        self._outbox.await_room()
        committer.refuse_if_fenced()
        started = time.perf_counter()
        begins = committer.standing.parent is None
        capture = self._model.capture(begins=begins, external=begins and self._external)
        failpoint("trainer.captured")
        return capture, facts, time.perf_counter() - started

    def _hand_over(
        self, committer: Committer, mine: Outcome[tuple[Capture, Mapping[str, Any], float]]
    ) -> PublishFuture:
        """On the keeper: the detector moves on, and what it found is in the queue: on every
        process, or on none."""
        self._peers.vote("capture", Outcome(error=mine.error))
        capture, facts, seconds = mine.get()
        self._model.detector.keep(capture)
        metrics = PublishMetrics(detect_seconds=seconds)
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
            version = committer.commit(publish, lambda: self._model.detector.captured)
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
        self._peers.keeper.await_idle()
        return self._committer

    def _await_anchor(self, committer: Committer) -> bool:
        """Until a line has its first version there is nothing to add changes to, and its anchor is
        encoded from the captured weights themselves: they must not move on meanwhile.

        Returns:
            Whether it hasn't begun even so.
        """
        if committer.standing.parent is None and self._last is not None:
            wait([self._last])
        return committer.standing.parent is None

    def _beside(self, to: int | str | None) -> tuple[VersionDocument, Standing]:
        head = find_channel(self._client, self._policy, self._channel)
        target = self._client.version(self._policy, self._channel if to is None else str(to))
        return target, Standing.beside(target, head)

    def _take_up(self, proven: Proven, standing: Standing) -> None:
        """Everything is proven: forget the earlier state, and start from this one."""
        self._committer, self._last = None, None
        self._model.start_from(proven)
        line = Line(
            self._policy, self._channel, proven.division,
            external=self._external, side_files=self._side_files, actor=self._actor,
            store=self._store,
        )  # fmt: skip
        self._committer = Committer(
            self._client, line, standing, self._patience, self._peers.commits
        )

    def _read_back(self, names: Collection[str]) -> Weights:
        """The state of the last publish, for a detector that can't tell it any more."""
        self._drain()
        parent = self.version
        if self._committer is None or parent is None:
            raise PublishError(
                f"{self._policy!r} has no version yet that {', '.join(sorted(names)[:8])} could "
                "be read back from",
                remedy="attach again",
            )
        pending = self._committer.since_parent
        return read_back(self._client, parent, self._model.share, pending, names, store=self._store)

    def _stands_on(self, version: VersionDocument) -> bool:
        parent = self.version
        return parent is not None and (parent.layout_digest, parent.fingerprint) == (
            version.layout_digest,
            version.fingerprint,
        )

    def _drain(self) -> None:
        """Returns once the worker has nothing to do."""
        if not self._closed:
            self._peers.keeper.await_idle()
            self._worker.await_idle()

    def _leave(self, *, within: float | None) -> None:
        """Does what was captured, and lets go of everything."""
        self._peers.keeper.await_idle()
        self._worker.stop()
        self._peers.close(within=within)
        self._model.detector.close()


def _refuse_in_a_group(chosen: Choice, *, grain: int, when_full: WhenFull) -> None:
    if chosen is False:
        return
    if grain > 1:
        raise UsageError(
            f"a grain of {grain}: several processes cut a policy along their own blocks",
            remedy="publish without a grain",
        )
    if when_full == "merge":
        raise UsageError(
            "when_full='merge': processes that publish together must merge the same publishes, and "
            "their queues are full at different moments",
            remedy="publish with when_full='wait'",
        )


def _kv_heads(model: object) -> int | None:
    """What the model's own configuration says, if it is one of transformers."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    fields = None if to_dict is None else to_dict()
    return kv_heads_of(fields) if isinstance(fields, Mapping) else None
