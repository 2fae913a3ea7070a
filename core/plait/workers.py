"""Threads for the codec's compiled loops, each of which stays on a CPU of its own.

A frame takes milliseconds. Threads that work so shortly are often left on the CPU that woke them,
where two take turns and gain nothing: schedulers spread load that lasts. So each worker pins
itself, once, as it starts, to one CPU of the process's own affinity mask, which a cpuset (a
container's, a launcher's, taskset's) has narrowed already and which is never widened. Decision 6
has the measurements.

A pin is only as good as its neighbours, therefore:

- Only these threads are pinned. The caller's thread and the threads and processes that it starts
  aren't; a worker hands its pin to whatever it starts, so work given to it starts nothing.
- Fewer workers than CPUs begin at a random one: processes of one host don't all take the first.
- Workers share work out as they get done with it, so one whose CPU is busy with something else
  does less. Between calls they sleep, and a pinned sleeper disturbs nobody.
- One pool serves a process (`shared`): making threads and warming their memory costs more than a
  frame, and two pools would pin two threads to each CPU.

Downloads and uploads wait rather than compute: they have ordinary threads.
"""

import itertools
import logging
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Final, Generic, ParamSpec, Self, TypeVar

from plait.errors import UsageError

VARIABLE: Final = "PLAIT_WORKERS"

_logger = logging.getLogger(__name__)
_thread = threading.local()

P = ParamSpec("P")
Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """A few threads, each on a CPU of its own where the system can pin them.

    Attributes:
        size: how many.

    Raises:
        UsageError: a count below 1.
    """

    def __init__(self, count: int | None = None, *, pinned: bool = True) -> None:
        """
        Args:
            count: of threads; by default one for each CPU that the process may use.
            pinned: False leaves their places to the system.
        """
        cpus = allowed_cpus()
        self.size = len(cpus) if count is None else count
        if self.size < 1:
            raise UsageError(f"{self.size} workers; expected at least 1")
        # A single one takes turns with nobody.
        places = _places(cpus) if pinned and min(len(cpus), self.size) > 1 else None
        self._pool = ThreadPoolExecutor(self.size, "plait-worker", _begin, (places,))

    def map(
        self, work: Callable[[Item], Result], items: Iterable[Item], *, at_once: int | None = None
    ) -> list[Result]:
        """`work` of every item, in their order. Called by a worker, it does all of it there.

        Args:
            at_once: workers that take part, at most.
        Raises:
            What `work` raised for the first item that failed; items behind it may be left out.
        """
        todo = list(items)
        hands = min(len(todo), self.size, at_once or self.size)
        # A worker that waited for others of its pool could wait for ever.
        if hands <= 1 or getattr(_thread, "is_worker", False):
            return [work(item) for item in todo]
        return _Sharing(work, todo).among(self._pool, hands)

    def submit(
        self, work: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs
    ) -> "Future[Result]":
        """Work for later; for a caller that takes results as they come."""
        return self._pool.submit(work, *args, **kwargs)

    def close(self) -> None:
        """Ends the threads, once they have done what they were given."""
        self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def allowed_cpus() -> tuple[int, ...]:
    """CPUs that this process may use, by number: its main thread's mask, whoever calls."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(os.getpid())))
    return tuple(range(os.cpu_count() or 1))


def shared() -> Workers:
    """The process's own workers; PLAIT_WORKERS says how many, by default one for each CPU.

    Raises:
        UsageError: PLAIT_WORKERS isn't a number from 1 up.
    """
    global _shared
    with _lock:
        if _shared is None:
            _shared = Workers(_wanted())
        return _shared


_lock = threading.Lock()
_shared: Workers | None = None


def _forget() -> None:
    """A forked child has none of its parent's threads, and maybe a lock that nobody will open."""
    global _lock, _shared
    _lock, _shared = threading.Lock(), None
    _thread.__dict__.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class _Sharing(Generic[Item, Result]):
    """A list of work that several threads take from, in order."""

    def __init__(self, work: Callable[[Item], Result], todo: Sequence[Item]) -> None:
        self._work = work
        self._todo = todo
        self._next = iter(range(len(todo)))
        self._taking = threading.Lock()
        self._found: dict[int, Result] = {}
        self._failed: dict[int, Exception] = {}
        self._stopped = False

    def among(self, pool: ThreadPoolExecutor, hands: int) -> list[Result]:
        futures = [pool.submit(self._take) for _ in range(hands)]
        try:
            wait(futures)
        finally:
            # After an interrupt too: what is being worked on must not outlive its caller.
            self._stopped = True
            wait(futures)
        if self._failed:
            raise self._failed[min(self._failed)]
        for future in futures:
            future.result()
        return [self._found[number] for number in range(len(self._todo))]

    def _take(self) -> None:
        while not self._stopped:
            with self._taking:
                number = next(self._next, None)
            if number is None:
                return
            try:
                self._found[number] = self._work(self._todo[number])
            except Exception as error:  # noqa: BLE001 (raised by `among`, the first of several)
                self._failed[number] = error
                self._stopped = True


def _places(cpus: Sequence[int]) -> Iterator[int]:
    # From the system's own source: nobody's seeded numbers are disturbed.
    first = random.SystemRandom().randrange(len(cpus))
    return itertools.cycle([*cpus[first:], *cpus[:first]])


def _begin(places: Iterator[int] | None) -> None:
    """A worker's first act."""
    _thread.is_worker = True
    if places is not None and hasattr(os, "sched_setaffinity"):
        with _lock:
            cpu = next(places)
        try:
            os.sched_setaffinity(0, {cpu})  # 0 is the calling thread
        except OSError as error:
            # The mask has changed meanwhile, or a sandbox forbids it: slower, and right.
            _logger.warning("a worker isn't pinned to CPU %d: %s", cpu, error)


def _wanted() -> int | None:
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"{VARIABLE} is {text!r:.40}; expected a number from 1 up")
    return int(text)
