"""The demo's processes: each leads a process group of its own, and is ended by that group's id."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from plait.errors import ServiceError

_POLL_S: Final = 0.05
_GRACE_S: Final = 10.0


class Child:
    """A started process and all that it starts.

    Args:
        command: arguments; the first is the program.
        log: file that takes its output.
        environment: added to this process's own.
    """

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        self._name = " ".join(command[1:4])
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until(self, ready: Callable[[], bool], *, within_s: float) -> None:
        """Returns when `ready` says so.

        Raises:
            ServiceError: the process died or took too long; with the end of its log.
        """
        deadline = time.monotonic() + within_s
        while not ready():
            if not self.is_alive or time.monotonic() > deadline:
                what = "took too long" if self.is_alive else "ended early"
                raise ServiceError(f"`{self._name}` {what}; its log ends: {self.log_end()}")
            time.sleep(_POLL_S)

    def log_end(self) -> str:
        return self.log.read_text(errors="replace")[-1500:]

    def kill(self) -> None:
        """SIGKILL to the group: no chance to tidy up."""
        end_group(self.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to what is left of the group after a while."""
        end_group(self.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self.kill()


def end_group(group: int, number: signal.Signals) -> None:
    """Signals a process group that this process started; one that has ended is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def plait_command(*arguments: str) -> list[str]:
    """The `plait` command line of this environment."""
    return [str(Path(sys.executable).with_name("plait")), *arguments]


def run_plait(*arguments: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """One `plait` command, as an operator would give it; its exit code is the caller's to judge."""
    return subprocess.run(
        plait_command(*arguments),
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
