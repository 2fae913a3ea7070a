"""How things are timed: the best of a few runs, which is the one that was disturbed least."""

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_STATUS: Final = Path("/proc/self/status")
_CLEAR_REFS: Final = Path("/proc/self/clear_refs")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names of its settings
_RESET_PEAK: Final = "5"  # of VmHWM, the most that was resident


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
    """By how much a piece of work raises the most that the process has in physical memory: what
    Python, numpy, compiled loops and zstd take, results included. Needs Linux's procfs.

    Not counted: pages that were the process's before, as weights written in place.
    """
    found: list[int] = []

    def measure() -> None:
        with memory_given_back() as before:
            work()
            found.append(max(resident_peak() - before, 0))

    # A thread of its own: what a thread keeps between calls is taken anew.
    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    return found[0]


@contextmanager
def memory_given_back() -> Iterator[int]:
    """Resident bytes now, from where the peak counts. Work in the body is slower.

    What was freed before has gone back to the system, large blocks come from there, and what is
    freed returns at once: memory that some heap holds for later would be counted, or would be used
    again and leave no trace.
    """
    gc.collect()
    allocator = ctypes.CDLL(None)
    allocator.mallopt(_MMAP_THRESHOLD, 1 << 17)
    allocator.mallopt(_TRIM_THRESHOLD, 0)
    allocator.malloc.restype, allocator.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    # This thread's heap may be one that an ended thread has left: it shrinks as something is freed.
    allocator.free(allocator.malloc(100_000))
    allocator.malloc_trim(0)
    _CLEAR_REFS.write_text(_RESET_PEAK)
    try:
        yield _resident("VmRSS")
    finally:
        # Where glibc's own adapting ends, as it had before: else what is timed next is slower.
        allocator.mallopt(_MMAP_THRESHOLD, 32 << 20)
        allocator.mallopt(_TRIM_THRESHOLD, 64 << 20)


def resident_peak() -> int:
    """The most bytes that were resident since memory was given back."""
    return _resident("VmHWM")


def _resident(field: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of them don't exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
