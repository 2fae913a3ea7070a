"""A real registry process, for tests that kill it, stop it, or run two of them."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx

_SERVE = "from plait_client.cli import main; main()"
_PREFIX = "plait: serving on "


class RegistryProcess:
    """One `plait serve`. Output goes to its folder."""

    def __init__(
        self,
        data: Path,
        database: str | None = None,
        failpoint: str = "",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.log = data / f"serve-{os.urandom(3).hex()}.log"
        options = ["--data", str(data), "--port", "0"]
        if database is not None:
            options += ["--database", database]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, "serve", *options],
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PLAIT_FAILPOINT": failpoint} | dict(settings or {}),
                text=True,
            )
        assert self.process.stdout is not None
        self.url = _served_at(self.process.stdout, self.log)
        self.http = httpx.Client(base_url=self.url, timeout=30, trust_env=False)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def terminate(self, seconds: float) -> int:
        """Asks it to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def registry_process(
    data: Path,
    database: str | None = None,
    failpoint: str = "",
    settings: Mapping[str, str] | None = None,
) -> Iterator[RegistryProcess]:
    """A registry that answers; killed at the end unless it has ended.

    Args:
        settings: environment variables.
    """
    registry = RegistryProcess(data, database, failpoint, settings)
    try:
        yield registry
    finally:
        registry.close()


def _served_at(output: IO[str], log: Path) -> str:
    for line in output:
        if line.startswith(_PREFIX):
            # Nobody reads on; a full pipe would block the process.
            threading.Thread(target=output.read, daemon=True).start()
            return line.removeprefix(_PREFIX).strip()
    raise AssertionError(f"the registry did not start: {log.read_text()}")
