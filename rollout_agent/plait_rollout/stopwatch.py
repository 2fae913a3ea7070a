"""How long a block took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Elapsed:
    """What a stopwatch showed when it stopped; 0 while it runs."""

    seconds: float = 0.0


@contextmanager
def stopwatch() -> Iterator[Elapsed]:
    """Measures the block, also one that raises."""
    elapsed = Elapsed()
    started = time.monotonic()
    try:
        yield elapsed
    finally:
        elapsed.seconds = time.monotonic() - started
