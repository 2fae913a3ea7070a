"""Named places where a test may kill the registry. Inert unless PLAIT_FAILPOINT names one."""

import os
import signal
from typing import Final, Literal

Failpoint = Literal[
    "chunk.received",
    "chunk.stored",
    "chunk.recorded",
    "commit.checked",
    "commit.numbered",
    "commit.written",
    "commit.moved",
    "commit.announced",
    "commit.committed",
    "move.written",
    "move.committed",
]

_ARMED: Final = os.environ.get("PLAIT_FAILPOINT", "")


def reach(name: Failpoint) -> None:
    """Dies here, by SIGKILL, if this is the armed failpoint."""
    if name == _ARMED:
        os.kill(os.getpid(), signal.SIGKILL)
