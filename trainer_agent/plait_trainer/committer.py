"""The worker's side of a publish: encode, upload, commit, and never lose a change.

Invariant: the committed parent's weights + what was sent and not yet settled + what is pending =
the weights of the last capture. A change leaves it only by being committed.

In a group every process encodes and uploads its own part; rank 0 commits once for all, and all of
them learn what came of it: they move on together, or none does.
"""

import copy
import logging
import threading
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
from plait_trainer.deltas import Deltas, encode_changes, encode_whole, statistics_of, sum_of
from plait_trainer.future import PublishMetrics
from plait_trainer.group import LEADER, Alone, Group, Outcome, lead
from plait_trainer.leader import Answer, Leader, Part
from plait_trainer.line import Line
from plait_trainer.outbox import Outbox, Publish
from plait_trainer.patience import Patience
from plait_trainer.share import Share
from plait_trainer.standing import Standing
from plait_trainer.steps import Step

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
    # The number of the parent's state.
    _start: int = 0
    _pending: Step | None = None
    # What was sent of this process's changes, without an answer.
    _sent: Step | None = None
    # Whoever holds it sees every change once.
    _moving: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._leader = Leader(self.client, self.line, self.patience)

    def take(self, outbox: Outbox) -> Publish:
        """The oldest publish of a queue, whose changes are pending from now on."""
        with self._moving:
            publish = outbox.take()
            step = publish.step
            self._pending = step if self._pending is None else self._pending.then(step)
        return publish

    def commit(self, publish: Publish, captured: Callable[[], Weights]) -> VersionDocument:
        """The version that a publish, the last one taken, has become.

        Args:
            captured: gives the weights of this publish, if it turns out to be an anchor.
        Raises:
            PlaitError: it isn't committed; its changes stay and are part of the next one.
            CommitUnknown: it may be; the next call finds out first.
        """
        self.refuse_if_fenced()
        if self._sent is not None:
            self._settle(self._sent)
        assert self._pending is not None
        begins = self.standing.parent is None
        step = Step(publish.step.number, {} if begins else self._pending.deltas)
        mine = Outcome.of(
            lambda: self.patience.get(lambda: self._upload(publish, step.deltas, captured))
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
        version = self._follow(answer, step, before=None)
        failpoint("trainer.committed")
        publish.metrics.commit_seconds += time.perf_counter() - started
        publish.metrics.payload_bytes = version.payload_bytes
        publish.metrics.changed_elements = version.changed_elements
        return version

    def since_parent(self, outbox: Outbox) -> tuple[Standing, int, list[Step]]:
        """What was captured from the parent's weights on, and isn't known to be committed.

        Args:
            outbox: where publishes wait for this committer.
        Returns:
            The standing; the number of the first state that is or may be committed; and the steps
            from there. Before a line's first version that is an anchor on its way, or the last
            capture.
        """
        with self._moving:
            sent, steps = self._sent, [step for step in (self._sent, self._pending) if step]
            steps += outbox.steps
            if self.standing.parent is not None or not steps:
                return self.standing, self._start, steps
            begun = sent or steps[-1]
            return self.standing, begun.number, [s for s in steps if s.number > begun.number]

    @property
    def pending(self) -> Deltas:
        """Changes that were taken, and aren't known to be committed."""
        with self._moving:
            return sum_of(step.deltas for step in (self._sent, self._pending) if step)

    @property
    def is_in_doubt(self) -> bool:
        """Whether a commit was sent that nobody knows the outcome of."""
        return self._sent is not None

    def refuse_if_fenced(self) -> None:
        """Raises HeadMoved if the channel isn't where this trainer left it."""
        if self.fence is not None:
            # A copy: an error that is raised again and again holds on to the frames of every time.
            raise copy.copy(self.fence)

    def stand(self, standing: Standing) -> None:
        """Continue from another standing, on the same weights, and lift the fence."""
        with self._moving:
            self.standing, self.fence, self._sent = standing, None, None

    def find_out(self) -> None:
        """Settles a commit without an answer by asking, if there is one; sends nothing."""
        if (sent := self._sent) is None:
            return
        version = lead(self.group, "find out about a commit", self._leader.look_up)
        with self._moving:
            self._sent = None
            if version is None:
                self._pending = sent.then(self._pending)
            else:
                self.standing, self._start = Standing.after(version), sent.number

    def _settle(self, sent: Step) -> VersionDocument:
        answer = self.group.exchange("settle a commit", None, lambda _: self._leader.send())
        return self._follow(answer, sent, before=self._pending)

    def _follow(self, answer: Answer, sent: Step, *, before: Step | None) -> VersionDocument:
        """Follows what came of a commit of `sent`.

        Args:
            before: what is pending if it is committed, or in doubt.
        """
        with self._moving:
            if answer.version is not None:
                self._sent, self._pending, self._start = None, before, sent.number
                self.standing = Standing.after(answer.version)
                return answer.version
            if answer.in_doubt:
                self._sent, self._pending = sent, before
            elif self._sent is not None:
                self._sent, self._pending = None, sent.then(self._pending)
        assert answer.error is not None
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
