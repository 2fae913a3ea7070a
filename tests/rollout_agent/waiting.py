"""Waiting for what another thread or process does, with a generous deadline."""

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    """Returns when it is true; fails the test if it never gets so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
