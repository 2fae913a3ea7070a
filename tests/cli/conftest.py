"""A registry, and the `plait` command with its address and a cache of its own."""

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.client.commands import Command, Result
from tests.client.serving import PLAIT, ServedRegistry


class Shell:
    """Runs `plait` with an environment of its own.

    Attributes:
        environment: what the command sees of plait's variables.
        installed: run the script that pip installed, as somebody at a terminal would; else the
            same `main` in a forked process, which starts faster.
    """

    def __init__(self, environment: dict[str, str], *, installed: bool = False) -> None:
        self.environment = environment
        self.installed = installed

    def run(self, *arguments: object, code: int = 0, **more: str) -> Result:
        """Run to the end and check the exit code."""
        words, environment = list(map(str, arguments)), self.environment | more
        result = (
            _script(words, environment) if self.installed else Command(words, environment).result()
        )
        assert result.code == code, result.stdout + result.stderr
        return result

    def json(self, *arguments: object, **more: str) -> dict[str, Any]:
        """The one document that a command prints with --json."""
        result = self.run(*arguments, "--json", **more)
        document = json.loads(result.stdout)
        assert isinstance(document, dict)
        return document


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRegistry]:
    served = ServedRegistry(tmp_path_factory.mktemp("registry")).start()
    yield served
    served.stop()


def _script(arguments: list[str], environment: dict[str, str]) -> Result:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PLAIT_")}
    done = subprocess.run(
        [PLAIT, *arguments], env=kept | environment, capture_output=True, text=True, check=False
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def plait(registry: ServedRegistry, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    cache = tmp_path_factory.mktemp("cache")
    return Shell({"PLAIT_URL": registry.url, "PLAIT_CACHE": str(cache)})


@pytest.fixture(scope="session")
def installed(plait: Shell) -> Shell:
    """The same, through the installed script."""
    return Shell(plait.environment, installed=True)
