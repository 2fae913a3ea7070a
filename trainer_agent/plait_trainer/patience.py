"""Waiting for a registry that is away."""

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from plait.errors import CommitUnknown, PlaitError
from plait_trainer.options import check_seconds

_PAUSE_SECONDS: Final = 0.2
_PAUSE_MOST: Final = 4.0  # a trainer that waits should notice soon that it need not

logger = logging.getLogger("plait.trainer")
T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """How long an action is repeated.

    Attributes:
        seconds: from its first failure on.
        stopping: set to give up at once.

    Raises:
        UsageError: not a number of seconds.
    """

    seconds: float
    stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        check_seconds(self.seconds, "patience")

    def get(self, action: Callable[[], T]) -> T:
        """The action's result. What isn't a registry's absence is raised at once."""
        waiting = Waiting(self)
        while True:
            try:
                return action()
            except PlaitError as error:
                if self.stopping.wait(waiting.pause_after(error)):
                    raise


class Waiting:
    """For one action to succeed."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._deadline: float | None = None
        self._failures = 0

    def pause_after(self, error: PlaitError) -> float:
        """Seconds from a failure of the action to its next attempt.

        Raises:
            PlaitError: the failure itself: waiting doesn't help, or has helped for long enough.
        """
        if not (error.retryable or isinstance(error, CommitUnknown)):
            raise error
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._patience.seconds
        if now >= self._deadline:
            raise error
        pause = min(_PAUSE_SECONDS * 2 ** min(self._failures, 10), _PAUSE_MOST)
        self._failures += 1
        logger.warning("waiting for the registry: %s", error.message)
        return float(min(pause * random.uniform(0.5, 1.0), self._deadline - now))
