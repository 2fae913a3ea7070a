"""A real registry in a process of its own, which tests may stop, kill and start again."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path


class RegistryProcess:
    """`plait serve` on a folder. A second start takes the same port."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self._port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        plait = Path(sys.executable).with_name("plait")
        command = [str(plait), "serve", "--data", str(self.data), "--port", str(self._port)]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PLAIT_")}
        self.data.mkdir(parents=True, exist_ok=True)
        with (self.data / "server.log").open("a") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=clean
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.search(r"http://[^:]+:(\d+)", line)
        assert found is not None, (line, (self.data / "server.log").read_text())
        self._port = int(found[1])

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(60)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def object_paths(self) -> list[Path]:
        """Every stored object's file."""
        return [path for path in (self.data / "objects").rglob("*") if path.is_file()]
