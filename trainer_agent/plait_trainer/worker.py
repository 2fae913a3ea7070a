"""One thread beside the training thread, doing what it is given in order."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


class Worker:
    """A thread with a queue. Ctrl-C reaches a program's main thread only, and so never this one."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)

    def start(self, action: Callable[[], object]) -> None:
        """Have it done behind the caller; the action looks after its own errors."""
        self._thread.submit(action)

    def run(self, action: Callable[[], T]) -> T:
        """The action's result. Whoever is interrupted meanwhile still leaves it done."""
        done = self._thread.submit(action)
        try:
            return done.result()
        finally:
            wait([done])

    def await_idle(self) -> None:
        """Returns once everything that was given before is done."""
        self._thread.submit(lambda: None).result()

    def stop(self) -> None:
        """Does what was given, and ends."""
        self._thread.shutdown(wait=True)
