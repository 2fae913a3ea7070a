"""A real registry in a process of its own, that can be killed and started again."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from plait.errors import PlaitError
from plait_client.registry import RegistryClient

_STARTS_WITHIN_SECONDS = 90.0


class RegistryProcess:
    """`plait serve` over one data folder and one port.

    Attributes:
        url: the same after a restart.
    """

    def __init__(self, data: Path) -> None:
        self.data = data
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._failpoint = ""

    @property
    def is_whole(self) -> bool:
        """Running, and without a failpoint."""
        running = self._process is not None and self._process.poll() is None
        return running and not self._failpoint

    def start(self, failpoint: str = "") -> None:
        """Starts it and waits until it answers, or has died at the failpoint.

        Args:
            failpoint: where it shall kill itself.
        """
        self._failpoint = failpoint
        environment = {**os.environ, "PLAIT_FAILPOINT": failpoint}
        environment.pop("PLAIT_TOKEN", None)
        command = [str(Path(sys.executable).with_name("plait")), "serve", "--data", str(self.data),
                   "--host", "127.0.0.1", "--port", str(self.port)]  # fmt: skip
        with (self.data.parent / "registry.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + _STARTS_WITHIN_SECONDS
        while True:
            try:
                with RegistryClient(self.url, attempts=1) as client:
                    client.config()
                return
            except PlaitError:
                if failpoint and self._process.poll() == -signal.SIGKILL:
                    return  # somebody's retry reached the failpoint first
                assert self._process.poll() is None, (self.data.parent / "registry.log").read_text()
                assert time.monotonic() < deadline, "the registry didn't start"
                time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL; returns once it is dead."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)

    def await_death(self) -> None:
        """Returns once a failpoint has killed it."""
        assert self._process is not None
        assert self._process.wait(60) == -signal.SIGKILL

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(20)
