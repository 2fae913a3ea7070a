"""One thread beside the training thread, doing what it is given in order."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, TypeVar

from plait.errors import PublisherClosed

T = TypeVar("T")

_REMEDY: Final = "close the publisher before the program ends: use it in a with statement"


class Worker:
    """A thread with a queue. Ctrl-C reaches a program's main thread only, and so never this one.

    It ends with `stop`, or with the program: what it was given by then is still done.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name, initializer=self._begin)
        self._own: threading.Thread | None = None
        self._stopped = False

    def start(self, action: Callable[[], object]) -> None:
        """Have it done behind the caller; the action looks after its own errors.

        Raises:
            PublisherClosed: the thread has ended.
        """
        self._submit(action)

    def run(self, action: Callable[[], T]) -> T:
        """The action's result. Whoever is interrupted meanwhile still leaves it done.

        Raises:
            PublisherClosed: the thread has ended.
        """
        done = self._submit(action)
        try:
            return done.result()
        finally:
            wait([done])

    def await_idle(self) -> None:
        """Returns once everything that was given before is done."""
        try:
            self._submit(lambda: None).result()
        except PublisherClosed:
            self._thread.shutdown(wait=True)

    def stop(self) -> None:
        """Does what was given, and ends. May be repeated, after an interrupt."""
        self._stopped = True
        self._thread.shutdown(wait=True)

    @property
    def is_current(self) -> bool:
        """Whether it is this thread that asks: what it waits for would wait for it."""
        return self._own is threading.current_thread()

    def _begin(self) -> None:
        self._own = threading.current_thread()

    def _submit(self, action: Callable[[], T]) -> "Future[T]":
        try:
            return self._thread.submit(action)
        except RuntimeError as error:
            if not (self._stopped or _is_of_the_end(error)):
                raise
            what = "publisher is closed" if self._stopped else "program has ended"
            raise PublisherClosed(f"the {what}", remedy=_REMEDY) from error


def cut_short(error: BaseException) -> BaseException:
    """The error of something that was under way as the program ended, in the publisher's words."""
    if not isinstance(error, RuntimeError) or not _is_of_the_end(error):
        return error
    told = PublisherClosed("the program ended before this publish was committed", remedy=_REMEDY)
    told.__cause__ = error
    return told


def _is_of_the_end(error: RuntimeError) -> bool:
    """Whether no thread takes work any more, since the main one is done. Python has no other way to
    ask than by trying, and no error of its own for it."""
    return "interpreter shutdown" in str(error)
