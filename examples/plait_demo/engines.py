"""The demo's rollout engines: real SGLang servers, or small processes around a torch module.

Either way an engine is asked over HTTP, has a follower beside it, and can be killed and started
again from the base model.
"""

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

import httpx

from plait_demo.processes import Child, end_group, free_port, plait_command
from plait_demo.rollouts import Sampler
from plait_rollout.sglang.launch import RunningEngine, launch_engine

_START_S: Final = 300.0
# An engine that waits for work sleeps, and one thread each: two cores serve them and the trainer.
_ENGINE_ARGUMENTS: Final = ("--sleep-on-idle",)
_ENGINE_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Host(Protocol):
    """One engine with its follower.

    Attributes:
        name: in the registry's fleet.
        sampler: asks the engine.
    """

    @property
    def name(self) -> str: ...

    @property
    def sampler(self) -> Sampler: ...

    def start_engine(self) -> None:
        """Starts the engine from the base model, and returns when it answers."""

    def start_follower(self) -> None:
        """Starts the follower, unless it lives in the engine's process."""

    def kill_engine(self) -> None:
        """SIGKILL to the engine's whole process group."""

    def stop(self) -> None:
        """Ends everything that was started."""


class SglangHost:
    """An SGLang server, whose live weights `plait follow` moves in place.

    Args:
        model: folder of the base model.
        home: for the spool, the follower's cache and logs.
        environment: tells the follower where the registry is.
        tp: tensor-parallel ranks.
    """

    def __init__(
        self, name: str, *, model: Path, policy: str, home: Path,
        environment: Mapping[str, str], tp: int,
    ) -> None:  # fmt: skip
        self.name = name
        self._model, self._policy, self._home, self._tp = model, policy, home, tp
        self._environment = {**environment, "PLAIT_CACHE": str(home / "cache")}
        self._port = free_port()
        self._spool = home / "spool"
        self._engine: RunningEngine | None = None
        self._follower: Child | None = None
        self.sampler = Sampler(f"http://127.0.0.1:{self._port}")
        home.mkdir(parents=True)

    def start_engine(self) -> None:
        self._engine = launch_engine(
            self._model,
            tp=self._tp,
            spool=self._spool,
            port=self._port,
            log=self._home / "engine.log",
            extra=_ENGINE_ARGUMENTS,
            environment=_ENGINE_ENVIRONMENT,
            wait_seconds=_START_S,
        )

    def start_follower(self) -> None:
        assert self._engine is not None
        self._follower = Child(
            plait_command(
                "follow", self._policy, "--engine", self._engine.url, "--spool", str(self._spool),
                "--no-reload", "--name", self.name,
            ),
            log=self._home / "follower.log",
            environment=self._environment,
        )  # fmt: skip

    def kill_engine(self) -> None:
        assert self._engine is not None
        end_group(self._engine.pid, signal.SIGKILL)
        self._engine.stop()

    def stop(self) -> None:
        self.sampler.close()
        if self._follower is not None:
            self._follower.stop()
        if self._engine is not None:
            self._engine.stop()


class ModuleHost:
    """A process that holds a torch module with its follower (plait_demo.module_host)."""

    def __init__(
        self, name: str, *, model: Path, policy: str, home: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self._port = free_port()
        self._command = [
            "-m", "plait_demo.module_host", "--model", str(model), "--policy", policy,
            "--name", name, "--port", str(self._port),
        ]  # fmt: skip
        self._home = home
        self._environment = {
            **environment, **_ENGINE_ENVIRONMENT, "PLAIT_CACHE": str(home / "cache")
        }  # fmt: skip
        self._process: Child | None = None
        self.sampler = Sampler(f"http://127.0.0.1:{self._port}")
        home.mkdir(parents=True)

    def start_engine(self) -> None:
        self._process = Child(
            [sys.executable, *self._command],
            log=self._home / "engine.log",
            environment=self._environment,
        )
        self._process.wait_until(self._serves, within_s=_START_S)

    def start_follower(self) -> None:
        """It runs in the engine's process."""

    def kill_engine(self) -> None:
        assert self._process is not None
        self._process.kill()

    def stop(self) -> None:
        self.sampler.close()
        if self._process is not None:
            self._process.stop()

    def _serves(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self._port}/health", timeout=5).is_success
        except httpx.HTTPError:
            return False
