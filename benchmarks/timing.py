"""How things are timed: the best of a few runs, which is the one that was disturbed least."""

import time
import tracemalloc
from collections.abc import Callable


def cpu_seconds(work: Callable[[], object], *, runs: int = 5) -> float:
    """Processor seconds of the cheapest of some runs, after one that doesn't count.

    For work on one thread: what other processes take from it doesn't count, so ratios hold on a
    machine that isn't idle.
    """
    work()
    found = []
    for _ in range(runs):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found)


def wall_seconds(work: Callable[[], object], *, runs: int = 5) -> float:
    """Seconds of the fastest of some runs, after one that doesn't count: for several threads."""
    work()
    found = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def peak_bytes(work: Callable[[], object]) -> int:
    """Most memory that Python and numpy held at once for a piece of work."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of them don't exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
