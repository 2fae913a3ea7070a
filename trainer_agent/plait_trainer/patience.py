"""Waiting for a registry that is away."""

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from plait.errors import CommitUnknown, PlaitError

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
    """

    seconds: float
    stopping: threading.Event = field(default_factory=threading.Event)

    def get(self, action: Callable[[], T]) -> T:
        """The action's result. What isn't a registry's absence is raised at once."""
        deadline: float | None = None
        for attempt in itertools.count():
            try:
                return action()
            except PlaitError as error:
                if not (error.retryable or isinstance(error, CommitUnknown)):
                    raise
                now = time.monotonic()
                deadline = now + self.seconds if deadline is None else deadline
                pause = min(_PAUSE_SECONDS * 2 ** min(attempt, 10), _PAUSE_MOST)
                pause *= random.uniform(0.5, 1.0)
                if now >= deadline:
                    raise
                logger.warning("waiting for the registry: %s", error.message)
                if self.stopping.wait(min(pause, deadline - now)):
                    raise
        raise AssertionError("unreachable")
