"""A real registry in a process of its own."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

PLAIT = Path(sys.executable).with_name("plait")


class ServedRegistry:
    """`plait serve` on a free port, which it keeps when it is stopped and started again."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.url = ""
        self._port = 0
        self._process: subprocess.Popen[str] | None = None
        self._drain: threading.Thread | None = None

    def start(self) -> Self:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PLAIT_")}
        self._process = subprocess.Popen(
            [PLAIT, "serve", "--data", self.data, "--port", str(self._port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            said.append(line)
            if match := re.search(r"serving on (http://\S+:(\d+))", line):
                self.url, self._port = match[1], int(match[2])
                # Nobody may be left waiting for a full pipe.
                self._drain = threading.Thread(target=self._process.stdout.read)
                self._drain.start()
                return self
        raise AssertionError(f"the registry didn't start: {''.join(said)}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=60)
            assert self._drain is not None
            assert self._process.stdout is not None
            self._drain.join()
            self._process.stdout.close()
            self._process = None

    def object_files(self) -> list[Path]:
        """Every stored object."""
        return sorted(p for p in (self.data / "objects").rglob("*") if p.is_file())
