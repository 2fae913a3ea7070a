"""Bounds of what one input may cost: calls and bytes, so that no clock decides a test."""

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Final

CALLS_MAX: Final = 400_000
BYTES_MAX: Final = 32 << 20


class TooMuchWorkError(Exception):
    """An input that keeps the readers busy for more calls than any honest one."""


def bounded(target: Callable[[bytes], None], data: bytes) -> None:
    """Runs the target once.

    Raises:
        TooMuchWorkError: more than CALLS_MAX calls of functions, Python's and C's.
        AssertionError: more than BYTES_MAX bytes at once, numpy's arrays included.
    """
    calls = 0

    def count(_frame: FrameType, _event: str, _argument: object) -> None:
        nonlocal calls
        calls += 1
        if calls > CALLS_MAX:
            sys.setprofile(None)
            raise TooMuchWorkError(f"more than {CALLS_MAX} calls for {len(data)} bytes")

    tracemalloc.start()
    sys.setprofile(count)
    try:
        target(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        sys.setprofile(None)
        tracemalloc.stop()
    assert peak <= BYTES_MAX, f"{peak} bytes held for an input of {len(data)}"
