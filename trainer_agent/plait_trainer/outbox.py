"""The bounded queue between the training thread and the worker."""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from plait.errors import PublisherClosed, UsageError
from plait.fingerprint import Fingerprint
from plait.version_record import Proof
from plait_trainer.future import PublishFuture, PublishMetrics
from plait_trainer.options import check_whole
from plait_trainer.steps import Step

WhenFull = Literal["wait", "merge"]


@dataclass(eq=False)
class Publish:
    """One captured publish on its way.

    Attributes:
        step: from the capture before it.
        fingerprint: of the weights at its capture.
        futures: of every publish that was merged into it; one at least.
    """

    step: Step
    fingerprint: Fingerprint
    proof: Proof
    metadata: Mapping[str, Any]
    metrics: PublishMetrics
    futures: list[PublishFuture] = field(default_factory=list)


class Outbox:
    """Publishes in order. Full means: `size` of them wait for the worker.

    Args:
        size: at least one.
        when_full: `wait` for room, or `merge` a new publish into the last one that waits.
    Raises:
        UsageError: a size or a policy that there isn't.
    """

    def __init__(self, size: int, when_full: WhenFull) -> None:
        check_whole(size, "queue_size")
        if when_full not in get_args(WhenFull):
            raise UsageError(f"when_full is {when_full!r}; expected one of {get_args(WhenFull)}")
        self._size, self._when_full = size, when_full
        self._waiting: deque[Publish] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def await_room(self) -> None:
        """Returns once `put` won't have to wait.

        Called before the capture, so that an interrupted wait can't lose one.

        Raises:
            PublisherClosed: meanwhile, or before.
        """
        with self._changed:
            self._changed.wait_for(self._has_room)
            if self._closed:
                raise PublisherClosed("the publisher is closed")

    def _has_room(self) -> bool:
        room = len(self._waiting) < self._size
        return room or self._when_full == "merge" or self._closed

    def put(self, publish: Publish) -> bool:
        """Add a publish. False: it became part of the last one that waits."""
        with self._changed:
            if len(self._waiting) < self._size:
                self._waiting.append(publish)
                return True
            last = self._waiting[-1]
            last.step = last.step.then(publish.step)
            last.fingerprint, last.proof = publish.fingerprint, publish.proof
            last.metadata = publish.metadata
            last.metrics.detect_seconds += publish.metrics.detect_seconds
            for future in publish.futures:
                future.metrics = last.metrics
            last.futures += publish.futures
            return False

    def take(self) -> Publish:
        """The oldest publish; there is one for each `put` that returned True."""
        with self._changed:
            publish = self._waiting.popleft()
            self._changed.notify_all()
            return publish

    @property
    def steps(self) -> list[Step]:
        """Of the publishes that wait, in their order."""
        with self._changed:
            return [publish.step for publish in self._waiting]

    def close(self) -> None:
        """Wakes whoever waits for room; what is in the queue stays."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
