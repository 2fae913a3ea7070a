"""Named places where a test can kill the process, so that every moment of a crash can be tried.

`PLAIT_FAILPOINT=NAME` or `PLAIT_FAILPOINT=NAME:K` ends the process with SIGKILL the first or K-th
time that the place is passed. Without the variable a failpoint does nothing.
"""

import os
import signal

_passed: dict[str, int] = {}


def failpoint(name: str) -> None:
    """Die here, without any clean-up, if the environment asks for it."""
    wanted, _, count = os.environ.get("PLAIT_FAILPOINT", "").partition(":")
    if wanted != name:
        return
    _passed[name] = _passed.get(name, 0) + 1
    if _passed[name] == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
