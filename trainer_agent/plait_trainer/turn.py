"""Whose turn it is: a publisher has one caller at a time, and not everybody can be it."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from plait.errors import UsageError


class Turn:
    """One caller at a time: a capture and its place in the queue belong together.

    Args:
        is_within: whether it is one of the publisher's own threads that asks.
    """

    def __init__(self, is_within: Callable[[], bool]) -> None:
        self._is_within = is_within
        self._process = os.getpid()
        self._lock = threading.RLock()

    def require_caller(self) -> None:
        """
        Raises:
            UsageError: a forked process asks, which has none of the publisher's threads; or one of
                these threads, which would wait for itself.
        """
        if os.getpid() != self._process:
            raise UsageError(
                f"this publisher is process {self._process}'s, which process {os.getpid()} was "
                "forked from",
                remedy="construct a publisher in the process that trains",
            )
        if self._is_within():
            raise UsageError(
                "a callback of a publish's future calls the publisher, and would wait for itself",
                remedy="call it on the training thread; a callback may hand work to another thread",
            )

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for the turn, and has it.

        Raises:
            UsageError: as `require_caller` does.
        """
        self.require_caller()
        with self._lock:
            yield
