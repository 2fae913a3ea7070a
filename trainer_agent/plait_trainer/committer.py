"""The worker's side of a publish: encode, upload, commit, and never lose a change.

Invariant: the committed parent's weights + what was sent and not yet settled + what is pending =
the weights of the last capture. A change leaves it only by being committed.

In a group every process encodes and uploads its own part; rank 0 commits once for all, and all of
them learn what came of it: they move on together, or none does.
"""

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from plait.codec.frames import EncodedFrame
from plait.errors import HeadMoved
from plait.manifest import ChunkEntry
from plait.weights import Weights
from plait.wire import VersionDocument
from plait_client.failpoints import failpoint
from plait_client.registry import RegistryClient
from plait_client.upload import upload_frames
from plait_trainer.deltas import Deltas, add_up, encode_changes, encode_whole, statistics_of
from plait_trainer.future import PublishMetrics
from plait_trainer.group import LEADER, Alone, Group, Outcome, lead
from plait_trainer.leader import Answer, Leader, Part
from plait_trainer.line import Line
from plait_trainer.outbox import Publish
from plait_trainer.patience import Patience
from plait_trainer.share import Share
from plait_trainer.standing import Standing

logger = logging.getLogger("plait.trainer")


@dataclass(eq=False)
class Committer:
    """Commits publishes one by one, on one thread.

    Attributes:
        standing: what the next commit starts from.
        patience: with a registry that is away.
        group: the processes that publish the line, in their own exchanges.
        fence: why nothing is committed until the next `stand`; None: nothing is wrong.
    """

    client: RegistryClient
    line: Line
    standing: Standing
    patience: Patience
    group: Group = field(default_factory=Alone)
    fence: HeadMoved | None = None
    _pending: Deltas = field(default_factory=dict)
    # What was sent of this process's changes, without an answer.
    _sent: Deltas | None = None

    def __post_init__(self) -> None:
        self._leader = Leader(self.client, self.line, self.patience)

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
        mine = Outcome.of(
            lambda: self.patience.get(lambda: self._upload(publish, deltas, captured))
        )
        failpoint("trainer.uploaded")
        started = time.perf_counter()
        answer = self.group.exchange(
            "commit",
            mine.told(),
            lambda parts: self._leader.commit(parts, self.standing, publish.metadata),
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
        self.standing, self.fence, self._sent = standing, None, None
        if not keep_pending:
            self._pending = {}

    def find_out(self) -> None:
        """Settles a commit without an answer by asking, if there is one; sends nothing."""
        if (sent := self._sent) is None:
            return
        version = lead(self.group, "find out about a commit", self._leader.look_up)
        self._sent = None
        if version is None:
            self._pending = add_up(sent, self._pending)
        else:
            self.standing = Standing.after(version)

    def _settle(self, sent: Deltas) -> VersionDocument:
        answer = self.group.exchange("settle a commit", None, lambda _: self._leader.send())
        return self._take(answer, sent, before=self._pending)

    def _take(self, answer: Answer, sent: Deltas, *, before: Deltas) -> VersionDocument:
        """Follows what came of a commit of `sent`.

        Args:
            before: what is pending if it is committed, or in doubt.
        """
        if answer.version is not None:
            self._sent, self._pending = None, before
            self.standing = Standing.after(answer.version)
            return answer.version
        assert answer.error is not None
        if answer.in_doubt:
            self._sent, self._pending = sent, before
        elif self._sent is not None:
            self._sent, self._pending = None, add_up(sent, self._pending)
        if isinstance(answer.error, HeadMoved):
            self.fence = copy.copy(answer.error)
        raise answer.error

    def _upload(self, publish: Publish, deltas: Deltas, captured: Callable[[], Weights]) -> Part:
        if self.group.rank == LEADER:
            self._leader.make_known()
        begins = self.standing.parent is None
        share = self.line.share(begins=begins)
        if not begins:
            frames: Iterable[EncodedFrame] = encode_changes(share.cut.cut, deltas)
        else:
            frames = () if self.line.external else encode_whole(share, captured())
        chunks = self._frames(share, frames, publish.metrics)
        size = sum(chunk.size for chunk in chunks)
        statistics = statistics_of(self.line.layout, None if begins else deltas, size)
        return Part(tuple(chunks), publish.fingerprint, publish.proof, statistics)

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
