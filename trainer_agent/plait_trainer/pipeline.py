"""From a capture on the training thread to a committed version, behind a bounded queue."""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import wait
from typing import Any

from plait.errors import PublishError
from plait.wire import VersionDocument
from plait_client.failpoints import failpoint
from plait_trainer.committer import Committer
from plait_trainer.detector import Capture
from plait_trainer.facts import facts_of
from plait_trainer.future import PublishFuture, PublishMetrics
from plait_trainer.group import Outcome
from plait_trainer.outbox import Outbox, Publish, WhenFull
from plait_trainer.peers import Peers
from plait_trainer.steps import Step, Uncommitted
from plait_trainer.tracking import TrackedModel
from plait_trainer.worker import Worker, cut_short

logger = logging.getLogger("plait.trainer")


class Pipeline:
    """Captures, queues and commits. One caller at a time.

    Args:
        queue_size: captured publishes that may wait for the worker.
        when_full: what a publish does then.
    Attributes:
        committer: None: not attached.
        last: the last publish since.
    """

    def __init__(
        self, model: TrackedModel, peers: Peers, *, queue_size: int, when_full: WhenFull
    ) -> None:
        self._model, self._peers = model, peers
        self._outbox = Outbox(queue_size, when_full)
        self._worker = Worker("plait-publish")
        self._captures = 0
        self.committer: Committer | None = None
        self.last: PublishFuture | None = None

    def start_from(self, committer: Committer | None) -> None:
        """Forget what was captured; everything that was is settled."""
        self.committer, self.last, self._captures = committer, None, 0

    def publish(self, metadata: Mapping[str, Any], *, external: bool) -> PublishFuture:
        """As `Publisher.publish` says.

        Args:
            external: whether an anchor uploads nothing.
        """
        committer = self._attached()
        copies = self._model.keeps_copies
        begins = self._await_anchor(committer)
        if begins and not copies and committer.is_in_doubt:
            # What an unanswered anchor held can't be told any more: is it there?
            self._peers.keeper.run(committer.find_out)
        mine = self._peers.attempt("capture", lambda: self._capture(committer, metadata, external))
        future = self._peers.keeper.run(lambda: self._hand_over(committer, mine))
        if begins and not copies:
            # The anchor is read from the live weights, which the next step changes.
            wait([future])
        return future

    def uncommitted(self) -> tuple[VersionDocument | None, Uncommitted]:
        """The last version that is known to be committed, and the changes since then: captured
        ones, and those since the last capture. Nothing moves; the registry is asked only if the
        detector has to read something back.

        Raises:
            PlaitError: as a capture does.
        """
        committer = self._attached()
        standing, start, steps = committer.since_parent(self._outbox)
        capture = self._model.capture(begins=False, external=False)
        steps.append(Step(self._captures + 1, capture.deltas))
        return standing.parent, Uncommitted(start, tuple(steps), capture.fingerprint)

    def drain(self) -> None:
        """Returns once the worker has nothing to do."""
        self._peers.keeper.await_idle()
        self._worker.await_idle()

    def refuse_more(self) -> None:
        """Wakes whoever waits for room in the queue."""
        self._outbox.close()

    @property
    def is_calling(self) -> bool:
        """Whether it is one of its own threads that asks: a callback of a future."""
        return self._worker.is_current or self._peers.keeper.is_current

    def stop(self) -> None:
        """Does what was captured, and ends. May be repeated, after an interrupt."""
        self._peers.keeper.await_idle()
        self._worker.stop()

    # --------------------------------------------------------------------------------------------

    def _attached(self) -> Committer:
        """Once no interrupted call is still at work."""
        if self.committer is None:
            raise PublishError("the publisher isn't attached", remedy="call attach() first")
        self._peers.keeper.await_idle()
        return self.committer

    def _await_anchor(self, committer: Committer) -> bool:
        """Until a line has its first version there is nothing to add changes to, and its anchor is
        encoded from the captured weights themselves: they must not move on meanwhile.

        Returns:
            Whether it hasn't begun even so.
        """
        if committer.standing.parent is None and self.last is not None:
            wait([self.last])
        return committer.standing.parent is None

    def _capture(
        self, committer: Committer, metadata: Mapping[str, Any], external: bool
    ) -> tuple[Capture, Mapping[str, Any], float]:
        """What changed, the checked metadata, and the seconds of the capture itself."""
        committer.refuse_if_fenced()
        facts = facts_of(metadata)
        self._outbox.await_room()
        committer.refuse_if_fenced()
        started = time.perf_counter()
        begins = committer.standing.parent is None
        capture = self._model.capture(begins=begins, external=begins and external)
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
        self._captures += 1
        metrics = PublishMetrics(detect_seconds=seconds)
        future = PublishFuture(metrics)
        step = Step(self._captures, capture.deltas)
        publish = Publish(step, capture.fingerprint, capture.proof, facts, metrics, [future])
        self.last = future
        if self._outbox.put(publish):
            self._worker.start(lambda: self._run_next(committer))
        return future

    def _run_next(self, committer: Committer) -> None:
        """On the worker: commits the oldest publish, and settles its futures either way."""
        publish = committer.take(self._outbox)
        try:
            version = committer.commit(publish, lambda: self._model.detector.captured)
        except BaseException as failure:
            error, policy = cut_short(failure), committer.line.policy
            logger.error("a publish of %s failed and stays pending: %s", policy, error)
            for future in publish.futures:
                future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        logger.info("%s", publish.metrics.line_of(version))
        for future in publish.futures:
            future.set_result(version)
