"""The Publisher: attach to a model, publish every step, lose nothing.

`publish()` captures what changed and returns; encoding, upload and commit follow on one background
thread, in order, behind a bounded queue.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, Self

import torch

from plait.errors import PlaitError, PublisherClosed, UsageError
from plait.grain import Grain, kv_heads_of
from plait.store import Store
from plait.weights import Weights
from plait.wire import VersionDocument
from plait_client.registry import RegistryClient
from plait_trainer.attachment import Attachment, Settings
from plait_trainer.choice import DetectorName, detector_of
from plait_trainer.detector import Detector
from plait_trainer.dtypes import DtypeRule
from plait_trainer.future import PublishFuture
from plait_trainer.lanes import Choice, Lanes, chosen_group
from plait_trainer.live import TensorSource
from plait_trainer.options import check_path, check_seconds
from plait_trainer.outbox import WhenFull
from plait_trainer.patience import Patience
from plait_trainer.peers import Peers
from plait_trainer.pipeline import Pipeline
from plait_trainer.sources import Converter, State, source_of
from plait_trainer.state import state_of
from plait_trainer.tracking import TrackedModel
from plait_trainer.turn import Turn

# What a process that is leaving waits for others who may not come.
_LEAVE_SECONDS: Final = 10.0


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
        rule = DtypeRule(dtype, {} if dtypes is None else dtypes)
        aliases = {} if ties is None else ties
        source = source_of(model, rule, aliases, names)
        cuts = Grain(grain, _kv_heads(model) if kv_heads is None else kv_heads)
        self._settings = Settings(
            policy, channel, new_anchor=new_anchor, external=external,
            side_files=check_path(side_files, "side_files"), actor=actor, store=store,
            dtypes=rule, ties=aliases,
        )  # fmt: skip
        self._patience = Patience(patience)
        check_seconds(peer_timeout, "peer_timeout", above=0)

        def open_lanes() -> Lanes:
            chosen = chosen_group(group, model, source.tensors)
            _refuse_in_a_group(chosen, grain=grain, when_full=when_full)
            return Lanes.open(chosen, timeout=peer_timeout, patience=patience)

        self._peers = Peers(open_lanes)
        self._model = TrackedModel(
            source, detector_of(detector), optimizer,
            peers=self._peers, grain=cuts, read_back=self._read_back,
        )  # fmt: skip
        self._pipeline = Pipeline(
            self._model, self._peers, queue_size=queue_size, when_full=when_full
        )
        self._attachment = Attachment(
            client, self._settings, model=self._model, peers=self._peers,
            pipeline=self._pipeline, patience=self._patience,
        )  # fmt: skip
        self._turn = Turn(lambda: self._pipeline.is_calling)
        self._closed = False
        # After `close` was interrupted, another one does the rest.
        self._left = False
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
        with self._turn.taken():
            self._settle()
            self._attachment.attach(base)

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
        with self._turn.taken():
            self._settle()
            self._attachment.rebase(to, base)

    @property
    def version(self) -> VersionDocument | None:
        """The last committed version, whose weights the next delta starts from."""
        return self._attachment.version

    @property
    def holds_version(self) -> bool:
        """Whether the model, when the publisher attached, was known to be that version; otherwise
        it was trained on from there, or there was none yet."""
        return self._attachment.holds_version

    def state_dict(self) -> dict[str, Any]:
        """What the trainer's own checkpoint should carry: identities, and the changes that aren't
        committed, as far as this process publishes them. No weights. Nobody is asked, unless
        weights were changed by hand and have to be read back: then it waits for the registry.

        The changes are from the last committed version to the present weights, whether they were
        captured or not: of the size that publishing them has. Between two steps; in a group, every
        process saves its own state, each at the same step.

        Raises:
            PublisherClosed.
            PlaitError: as `publish` does where the weights can't be published as they stand.
        """
        with self._turn.taken():
            self._refuse_if_closed()
            policy, channel = self._settings.policy, self._settings.channel
            if self._pipeline.committer is None:
                return state_of(policy, channel, None)
            version, changes = self._pipeline.uncommitted()
            return state_of(policy, channel, version, (self._model.share, changes))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the trainer that wrote the checkpoint, once its weights are loaded.

        Content decides: the weights at hand must be those that the state was saved with, and the
        channel's head the version that it was saved at, or one of those that were on their way. The
        next publish is the difference. Weights that the registry knows are taken up as `attach`
        does, whatever the state says.

        Raises:
            UsageError: another policy's or channel's state, or none at all.
            FormatError, CorruptionError: a damaged state. Nothing has happened.
            NotFound: the registry has never had that version: it is another one, or was restored.
            HeadMoved: the weights come from a version that isn't the head; see `rebase`.
            PlaitError: as `attach` does.
        """
        with self._turn.taken():
            self._settle()
            self._attachment.load(state)

    # Publishing ---------------------------------------------------------------------------------

    def publish(self, metadata: Mapping[str, Any] | None = None) -> PublishFuture:
        """Capture what changed since the last publish, and have it committed behind this thread.

        Only the capture happens here. It waits for room in the queue (`when_full="wait"`), and
        while the line's first anchor, which is read from the snapshot, is under way; with a
        detector that keeps no copy it waits for that anchor itself. Ctrl-C finds a publish either
        not begun or on its way, never in between.

        Args:
            metadata: training facts (step, learning rate…) for the version record. Numbers of torch
                and numpy are taken as such; one that isn't finite is kept as text.
        Raises:
            HeadMoved: the channel isn't where this trainer left it; see `rebase`.
            LayoutChanged: names, dtypes or shapes differ from those that it attached with.
            PublishError: not attached, or declared ties are broken.
            PublisherClosed, DocumentInvalid, LimitExceeded.
            In each case nothing was captured: the next publish finds the same changes and more.
        """
        with self._turn.taken():
            self._refuse_if_closed()
            facts = {} if metadata is None else metadata
            return self._pipeline.publish(facts, external=self._settings.external)

    def flush(self) -> None:
        """Waits until every publish is committed or has failed.

        Raises:
            PlaitError: the last one's, if it failed: its changes are not committed.
        """
        with self._turn.taken():
            self._pipeline.drain()
            if (last := self._pipeline.last) is not None:
                last.result()

    def close(self, *, abandon: bool = False) -> None:
        """Flushes, and stops. Closing twice is allowed, and goes on where an interrupt ended the
        first.

        A program that ends without it commits nothing more: what was on its way fails, and the log
        says so.

        Args:
            abandon: don't wait any longer for a registry that is away than one request does.
        Raises:
            PlaitError: as `flush` does; it is closed all the same.
        """
        self._close(abandon=abandon, within=_LEAVE_SECONDS if abandon else None)

    def _close(self, *, abandon: bool, within: float | None) -> None:
        self._turn.require_caller()
        if abandon:
            self._patience.stopping.set()
        self._pipeline.refuse_more()
        with self._turn.taken():
            self._closed = True
            if self._left:
                return
            self._leave(within=within)
            self._left = True
            if (last := self._pipeline.last) is not None:
                last.result()

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

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise PublisherClosed("the publisher is closed")

    def _settle(self) -> None:
        """Returns once nothing is under way."""
        self._refuse_if_closed()
        self._pipeline.drain()

    def _read_back(self, names: Collection[str]) -> Weights:
        self._pipeline.drain()
        return self._attachment.read_back(names)

    def _leave(self, *, within: float | None) -> None:
        """Does what was captured, and lets go of everything."""
        self._pipeline.stop()
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
