"""The `plait` command in a process of its own, started in milliseconds.

A server process has imported everything and forks for each command, so that a test can kill dozens
of real processes without waiting for as many imports.
"""

import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.client.commands", "plait_client.commands"])

LARGEST_FILE = "TEST_LARGEST_FILE"  # bytes; a stand-in for a full disk


@dataclass(frozen=True)
class Result:
    """How a command ended: `code` is negative after a signal."""

    code: int
    stdout: str
    stderr: str


class Command:
    """One run of `plait`. The environment has nothing of plait's but what is given."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="plait-command-")
        self._process = _context.Process(
            target=_run, args=(list(arguments), dict(environment), self._folder.name)
        )
        self._process.start()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._folder.cleanup()

    def result(self) -> Result:
        self._process.join(timeout=180)
        code = self._process.exitcode
        assert code is not None, "the command hangs"
        out, err = (_said(Path(self._folder.name) / name) for name in ("out", "err"))
        self._folder.cleanup()
        return Result(code, out, err)


def _said(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _run(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    from plait_client.cli import main

    for number, name in ((1, "out"), (2, "err")):
        descriptor = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, number)
    for name in [name for name in os.environ if name.startswith("PLAIT_")]:
        del os.environ[name]
    os.environ.update(environment)
    if limit := os.environ.get(LARGEST_FILE):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    sys.argv = ["plait", *arguments]
    main()
