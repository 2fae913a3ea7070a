"""The worker's side of a publish: encode, upload, commit, and never lose a change.

Invariant: the committed parent's weights + what was sent and not yet settled + what is pending =
the weights of the last capture. A change leaves it only by being committed.
"""

import copy
import itertools
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from plait.codec.frames import EncodedFrame
from plait.errors import (
    AlreadyExists,
    CommitUnknown,
    HeadMoved,
    NotFound,
    PlaitError,
    RegistryUnavailable,
)
from plait.fingerprint import Fingerprint
from plait.grain import Grain, SlottedCut
from plait.layout import Layout
from plait.manifest import ChunkEntry, Manifest, VersionRecord
from plait.store import Store
from plait.weights import Weights
from plait.wire import VersionDocument
from plait_client.failpoints import failpoint
from plait_client.registry import RegistryClient
from plait_client.upload import commit_version, put_cut, put_layout, upload_frames
from plait_trainer.deltas import Deltas, add_up, encode_changes, encode_whole, statistics_of
from plait_trainer.future import PublishMetrics
from plait_trainer.outbox import Publish
from plait_trainer.side_files import upload_side_files
from plait_trainer.standing import Standing

_PAUSE_SECONDS: Final = 0.2
_PAUSE_MOST: Final = 4.0  # a trainer that waits should notice soon that it need not

logger = logging.getLogger("plait.trainer")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Line:
    """What stays the same from publish to publish.

    Attributes:
        cut: of the deltas.
        grain: what anchors are cut along.
        external: the first anchor uploads nothing: both sides hold its weights.
        side_files: folder whose files travel with anchors.
        patience: seconds that a publish waits for a registry that is away.
        store: written directly; None: through the registry.
    """

    policy: str
    channel: str
    layout: Layout
    cut: SlottedCut
    grain: Grain = field(default_factory=Grain)
    external: bool = False
    side_files: Path | None = None
    actor: str = ""
    patience: float = 600.0
    store: Store | None = None


@dataclass(frozen=True, eq=False)
class _Sent:
    """A commit that is about to be sent, or was, without an answer.

    The record's nonce makes the very same commit recognisable: it is only ever sent again.
    """

    record: VersionRecord
    manifest: Manifest
    deltas: Deltas
    standing: Standing


@dataclass(eq=False)
class Committer:
    """Commits publishes one by one, on one thread.

    Attributes:
        standing: what the next commit starts from.
        fence: why nothing is committed until the next `stand`; None: nothing is wrong.
        stopping: set to give up waiting for a registry that is away.
    """

    client: RegistryClient
    line: Line
    standing: Standing
    fence: HeadMoved | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    _pending: Deltas = field(default_factory=dict)
    _sent: _Sent | None = None
    _known: set[str] = field(default_factory=set)

    def commit(self, publish: Publish, captured: Callable[[], Weights]) -> VersionDocument:
        """The version that a publish has become.

        Args:
            captured: gives the weights of this publish, if it turns out to be an anchor.
        Raises:
            PlaitError: it isn't committed; its changes stay and are part of the next one.
            CommitUnknown: it may be; the next call finds out first.
        """
        self._pending = add_up(self._pending, publish.deltas)
        self.refuse_if_fenced()
        if self._sent is not None:
            self._settle(self._sent)
        sent = self._persist(lambda: self._upload(publish, captured))
        self._sent, self._pending = sent, {}
        failpoint("trainer.uploaded")
        started = time.perf_counter()
        version = self._settle(sent)
        failpoint("trainer.committed")
        publish.metrics.commit_seconds += time.perf_counter() - started
        publish.metrics.payload_bytes = version.payload_bytes
        publish.metrics.changed_elements = version.changed_elements
        return version

    @property
    def pending(self) -> Deltas:
        """What was captured and isn't committed, from the parent's weights on; what was sent and
        not yet settled apart."""
        return self._pending

    @property
    def is_in_doubt(self) -> bool:
        """Whether a commit was sent that nobody knows the outcome of."""
        return self._sent is not None

    def refuse_if_fenced(self) -> None:
        """Raises HeadMoved if the channel isn't where this trainer left it."""
        if self.fence is not None:
            # A copy: an error that is raised again and again holds on to the frames of every time.
            raise copy.copy(self.fence)

    def stand(self, standing: Standing, *, keep_pending: bool) -> None:
        """Continue from another standing, and lift the fence.

        Args:
            keep_pending: the parent's weights are those that the pending changes start from.
        """
        self.standing, self.fence, self._sent = standing, None, None
        if not keep_pending:
            self._pending = {}

    def find_out(self) -> None:
        """Settles a commit without an answer by asking, if there is one; sends nothing."""
        if (sent := self._sent) is None:
            return
        version = self.client.find_commit(self.line.policy, sent.record.digest)
        self._sent = None
        if version is None:
            self._pending = add_up(sent.deltas, self._pending)
        else:
            self.standing = Standing.after(version)

    def _settle(self, sent: _Sent) -> VersionDocument:
        try:
            version = self._persist(lambda: self._send(sent))
        except (CommitUnknown, RegistryUnavailable):
            raise  # it may be committed: `sent` stays, and is sent again first
        except PlaitError as error:
            self._pending, self._sent = add_up(sent.deltas, self._pending), None
            if isinstance(error, HeadMoved):
                self.fence = copy.copy(error)
            raise
        self._sent, self.standing = None, Standing.after(version)
        return version

    def _send(self, sent: _Sent) -> VersionDocument:
        return commit_version(
            self.client,
            policy=self.line.policy,
            channel=self.line.channel,
            record=sent.record,
            manifest=sent.manifest,
            expected_head=sent.standing.head,
            expected_generation=sent.standing.generation,
            actor=self.line.actor,
        )

    def _upload(self, publish: Publish, captured: Callable[[], Weights]) -> _Sent:
        parent = self.standing.parent
        self._make_known()
        if parent is None:
            deltas: Deltas = {}
            manifest = self._anchor(publish, captured())
        else:
            deltas = self._pending
            manifest = self._delta(publish, deltas, Fingerprint.parse(parent.fingerprint))
        record = VersionRecord(
            policy=self.line.policy,
            layout=self.line.layout.digest,
            parent=None if parent is None else parent.version_digest,
            fingerprint=publish.fingerprint,
            proof="unproven" if manifest.external else publish.proof,
            nonce=secrets.token_hex(16),
            metadata=publish.metadata,
        )
        return _Sent(record, manifest, deltas, self.standing)

    def _delta(self, publish: Publish, deltas: Deltas, base: Fingerprint) -> Manifest:
        line = self.line
        chunks = self._frames(line.cut, encode_changes(line.cut.cut, deltas), publish.metrics)
        return Manifest(
            kind="delta",
            layout=line.layout.digest,
            cut=line.cut.cut.digest if chunks else None,
            base=base,
            target=publish.fingerprint,
            chunks=tuple(chunks),
            statistics=statistics_of(line.layout, deltas, sum(chunk.size for chunk in chunks)),
        )

    def _anchor(self, publish: Publish, captured: Weights) -> Manifest:
        line = self.line
        cut = line.grain.cut(line.layout, for_anchor=True)
        frames = () if line.external else encode_whole(cut.cut, captured)
        chunks = self._frames(cut, frames, publish.metrics)
        side_files = line.side_files
        return Manifest(
            kind="anchor",
            layout=line.layout.digest,
            cut=cut.cut.digest if chunks else None,
            base=None,
            target=publish.fingerprint,
            chunks=tuple(chunks),
            statistics=statistics_of(line.layout, None, sum(chunk.size for chunk in chunks)),
            external=line.external,
            side_files=() if side_files is None else upload_side_files(self.client, side_files),
        )

    def _frames(
        self, slotted: SlottedCut, frames: Iterable[EncodedFrame], metrics: PublishMetrics
    ) -> list[ChunkEntry]:
        started, encoded_before = time.perf_counter(), metrics.encode_seconds
        chunks = upload_frames(
            self.client, _timed(frames, metrics), slot=slotted.slots, store=self.line.store
        )
        if chunks and slotted.cut.digest not in self._known:
            self._known.add(put_cut(self.client, slotted.cut))
        encoding = metrics.encode_seconds - encoded_before
        metrics.upload_seconds += time.perf_counter() - started - encoding
        return chunks

    def _make_known(self) -> None:
        """The policy and the layout, before anything refers to them."""
        if self.line.layout.digest in self._known:
            return
        try:
            self.client.policy(self.line.policy)
        except NotFound:
            _create(self.client, self.line.policy)
        self._known.add(put_layout(self.client, self.line.layout))

    def _persist(self, action: Callable[[], T]) -> T:
        """The action's result, waiting for a registry that is away as long as patience lasts."""
        deadline: float | None = None
        for attempt in itertools.count():
            try:
                return action()
            except PlaitError as error:
                if not (error.retryable or isinstance(error, CommitUnknown)):
                    raise
                now = time.monotonic()
                deadline = now + self.line.patience if deadline is None else deadline
                pause = min(_PAUSE_SECONDS * 2.0**attempt, _PAUSE_MOST)
                pause *= random.uniform(0.5, 1.0)
                if now >= deadline:
                    raise
                logger.warning("waiting for the registry: %s", error.message)
                if self.stopping.wait(min(pause, deadline - now)):
                    raise
        raise AssertionError("unreachable")


def _create(client: RegistryClient, policy: str) -> None:
    try:
        client.create_policy(policy)
    except AlreadyExists:
        logger.debug("policy %r was created meanwhile", policy)


def _timed(frames: Iterable[EncodedFrame], metrics: PublishMetrics) -> Iterator[EncodedFrame]:
    """The same frames; the time that each took to encode is taken down."""
    source = iter(frames)
    while True:
        started = time.perf_counter()
        frame = next(source, None)
        metrics.encode_seconds += time.perf_counter() - started
        if frame is None:
            return
        yield frame
