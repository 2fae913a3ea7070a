"""How things are timed: the best of a few runs, which is the one that was disturbed least."""

import time
from collections.abc import Callable


def cpu_seconds(work: Callable[[], object], *, runs: int = 7) -> float:
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


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of them don't exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
