"""The worker's side of a publish: encode, upload, commit, and never lose a change.

Invariant: the committed parent's weights + what was sent and not yet settled + what is pending =
the weights of the last capture. A change leaves it only by being committed.

In a group every process encodes and uploads its own part; rank 0 commits once for all, and all of
them learn what came of it: they move on together, or none does.
"""

import copy
import itertools
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
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
from plait.fingerprint import ZERO, Fingerprint
from plait.layout import Layout
from plait.manifest import ChunkEntry, Manifest, Statistics
from plait.store import Store
from plait.version_record import Proof, VersionRecord
from plait.weights import Weights
from plait.wire import VersionDocument
from plait_client.failpoints import failpoint
from plait_client.registry import RegistryClient
from plait_client.upload import commit_version, put_cut, put_layout, upload_frames
from plait_trainer.deltas import Deltas, add_up, encode_changes, encode_whole, statistics_of
from plait_trainer.future import PublishMetrics
from plait_trainer.group import LEADER, Alone, Group, Outcome, lead, refuse_failures
from plait_trainer.outbox import Publish
from plait_trainer.share import Share
from plait_trainer.sharing import Division
from plait_trainer.side_files import upload_side_files
from plait_trainer.standing import Standing

_PAUSE_SECONDS: Final = 0.2
_PAUSE_MOST: Final = 4.0  # a trainer that waits should notice soon that it need not

_PROOFS: Final[tuple[Proof, ...]] = ("full", "incremental", "unproven")  # the strongest first

logger = logging.getLogger("plait.trainer")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Line:
    """What stays the same from publish to publish.

    Attributes:
        division: who publishes what of it.
        external: the first anchor uploads nothing: both sides hold its weights.
        side_files: folder whose files travel with anchors.
        patience: seconds that a publish waits for a registry that is away.
        store: written directly; None: through the registry.
    """

    policy: str
    channel: str
    division: Division
    external: bool = False
    side_files: Path | None = None
    actor: str = ""
    patience: float = 600.0
    store: Store | None = None

    @property
    def layout(self) -> Layout:
        return self.division.layout


@dataclass(frozen=True, eq=False)
class _Part:
    """What one process has uploaded of a publish.

    Attributes:
        fingerprint: of its share at the capture.
        statistics: of its own chunks.
    """

    chunks: tuple[ChunkEntry, ...]
    fingerprint: Fingerprint
    proof: Proof
    statistics: Statistics


@dataclass(frozen=True, eq=False)
class _Letter:
    """A commit that is about to be sent, or was, without an answer: rank 0 has it.

    The record's nonce makes the very same commit recognisable: it is only ever sent again.
    """

    record: VersionRecord
    manifest: Manifest
    standing: Standing


@dataclass(frozen=True, eq=False)
class _Answer:
    """What a commit has come to.

    Attributes:
        version: it is committed.
        error: why it isn't; or why nobody knows.
        in_doubt: it was sent, and may be committed: it is sent again first.
    """

    version: VersionDocument | None = None
    error: Exception | None = None
    in_doubt: bool = False


@dataclass(eq=False)
class Committer:
    """Commits publishes one by one, on one thread.

    Attributes:
        standing: what the next commit starts from.
        group: the processes that publish the line, in their own exchanges.
        fence: why nothing is committed until the next `stand`; None: nothing is wrong.
        stopping: set to give up waiting for a registry that is away.
    """

    client: RegistryClient
    line: Line
    standing: Standing
    group: Group = field(default_factory=Alone)
    fence: HeadMoved | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    _pending: Deltas = field(default_factory=dict)
    # What was sent of this process's changes; and on rank 0 the commit itself.
    _sent: Deltas | None = None
    _letter: _Letter | None = None
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
        deltas: Deltas = {} if self.standing.parent is None else self._pending
        mine = Outcome.of(lambda: self._persist(lambda: self._upload(publish, deltas, captured)))
        failpoint("trainer.uploaded")
        started = time.perf_counter()
        answer = self.group.exchange(
            "commit", mine.told(), lambda parts: self._commit(parts, publish)
        )
        if answer.version is None:
            mine.get()  # its own error is the one to be told
        version = self._take(answer, deltas, before={})
        failpoint("trainer.committed")
        publish.metrics.commit_seconds += time.perf_counter() - started
        publish.metrics.payload_bytes = version.payload_bytes
        publish.metrics.changed_elements = version.changed_elements
        return version

    @property
    def since_parent(self) -> Deltas:
        """What was captured from the parent's weights on, and isn't known to be committed."""
        return add_up(self._sent or {}, self._pending)

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
        self.standing, self.fence, self._sent, self._letter = standing, None, None, None
        if not keep_pending:
            self._pending = {}

    def find_out(self) -> None:
        """Settles a commit without an answer by asking, if there is one; sends nothing."""
        if (sent := self._sent) is None:
            return
        version = lead(self.group, "find out about a commit", self._look_up)
        self._sent = self._letter = None
        if version is None:
            self._pending = add_up(sent, self._pending)
        else:
            self.standing = Standing.after(version)

    def _look_up(self) -> VersionDocument | None:
        assert self._letter is not None
        return self.client.find_commit(self.line.policy, self._letter.record.digest)

    def _settle(self, sent: Deltas) -> VersionDocument:
        answer = self.group.exchange("settle a commit", None, lambda _: self._send())
        return self._take(answer, sent, before=self._pending)

    def _take(self, answer: _Answer, sent: Deltas, *, before: Deltas) -> VersionDocument:
        """Follows what came of a commit of `sent`.

        Args:
            before: what is pending if it is committed, or in doubt.
        """
        if answer.version is not None:
            self._sent, self._letter, self._pending = None, None, before
            self.standing = Standing.after(answer.version)
            return answer.version
        assert answer.error is not None
        if answer.in_doubt:
            self._sent, self._pending = sent, before
        else:
            if self._sent is not None:
                self._pending = add_up(self._sent, self._pending)
            self._sent = self._letter = None
        if isinstance(answer.error, HeadMoved):
            self.fence = copy.copy(answer.error)
        raise answer.error

    # On rank 0 ------------------------------------------------------------------------------------

    def _commit(self, parts: list[Outcome[_Part]], publish: Publish) -> _Answer:
        """All parts, or none of them."""
        try:
            refuse_failures("upload", parts)
            self._letter = self._persist(lambda: self._write([p.get() for p in parts], publish))
        except Exception as error:  # noqa: BLE001 (it is told to all)
            return _Answer(error=Outcome(error=error).told().error)
        failpoint("trainer.before_commit")
        answer = self._send()
        failpoint("trainer.after_commit")
        return answer

    def _send(self) -> _Answer:
        assert self._letter is not None
        letter = self._letter
        try:
            version = self._persist(
                lambda: commit_version(
                    self.client,
                    policy=self.line.policy,
                    channel=self.line.channel,
                    record=letter.record,
                    manifest=letter.manifest,
                    expected_head=letter.standing.head,
                    expected_generation=letter.standing.generation,
                    actor=self.line.actor,
                )
            )
        except Exception as error:  # noqa: BLE001 (it is told to all)
            # Whatever isn't a plain refusal may be committed: it is sent again first.
            refused = isinstance(error, PlaitError)
            unanswered = isinstance(error, CommitUnknown | RegistryUnavailable)
            told = Outcome[VersionDocument](error=error).told().error
            return _Answer(error=told, in_doubt=unanswered or not refused)
        return _Answer(version=version)

    def _write(self, parts: list[_Part], publish: Publish) -> _Letter:
        """The commit of all parts; whatever it refers to is made known."""
        line, parent = self.line, self.standing.parent
        share = self._share
        chunks = tuple(chunk for part in parts for chunk in part.chunks)
        if chunks and share.cut.cut.digest not in self._known:
            self._known.add(put_cut(self.client, share.cut.cut))
        target = sum((part.fingerprint for part in parts), ZERO)
        begins_external = parent is None and line.external
        side_files = line.side_files if parent is None else None
        manifest = Manifest(
            kind="anchor" if parent is None else "delta",
            layout=line.layout.digest,
            cut=share.cut.cut.digest if chunks else None,
            base=None if parent is None else Fingerprint.parse(parent.fingerprint),
            target=target,
            chunks=chunks,
            statistics=_added_up([part.statistics for part in parts], line.layout, parent is None),
            external=begins_external,
            side_files=() if side_files is None else upload_side_files(self.client, side_files),
        )
        proof = max((part.proof for part in parts), key=_PROOFS.index)
        record = VersionRecord(
            policy=line.policy,
            layout=line.layout.digest,
            parent=None if parent is None else parent.version_digest,
            fingerprint=target,
            proof="unproven" if begins_external else proof,
            nonce=secrets.token_hex(16),
            metadata=publish.metadata,
        )
        return _Letter(record, manifest, self.standing)

    def _make_known(self) -> None:
        """The policy and the layout, before anything refers to them."""
        if self.line.layout.digest in self._known:
            return
        try:
            self.client.policy(self.line.policy)
        except NotFound:
            _create(self.client, self.line.policy)
        self._known.add(put_layout(self.client, self.line.layout))

    # On every rank --------------------------------------------------------------------------------

    @property
    def _share(self) -> Share:
        division = self.line.division
        return division.anchors if self.standing.parent is None else division.deltas

    def _upload(self, publish: Publish, deltas: Deltas, captured: Callable[[], Weights]) -> _Part:
        if self.group.rank == LEADER:
            self._make_known()
        share, begins = self._share, self.standing.parent is None
        if not begins:
            frames: Iterable[EncodedFrame] = encode_changes(share.cut.cut, deltas)
        else:
            frames = () if self.line.external else encode_whole(share, captured())
        chunks = self._frames(share, frames, publish.metrics)
        size = sum(chunk.size for chunk in chunks)
        statistics = statistics_of(self.line.layout, None if begins else deltas, size)
        return _Part(tuple(chunks), publish.fingerprint, publish.proof, statistics)

    def _frames(
        self, share: Share, frames: Iterable[EncodedFrame], metrics: PublishMetrics
    ) -> list[ChunkEntry]:
        started, encoded_before = time.perf_counter(), metrics.encode_seconds
        chunks = upload_frames(
            self.client, _timed(frames, metrics), slot=share.cut.slots, store=self.line.store
        )
        encoding = metrics.encode_seconds - encoded_before
        metrics.upload_seconds += time.perf_counter() - started - encoding
        return chunks

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


def _added_up(parts: list[Statistics], layout: Layout, is_anchor: bool) -> Statistics:
    whole = statistics_of(layout, None if is_anchor else {}, sum(p.chunk_bytes for p in parts))
    if is_anchor:
        return whole
    return replace(
        whole,
        changed_elements=sum(part.changed_elements for part in parts),
        changed_bytes=sum(part.changed_bytes for part in parts),
    )
