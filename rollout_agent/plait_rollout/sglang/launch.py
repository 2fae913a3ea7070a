"""Starts a CPU engine as a process group of its own: for tests, the demo and a first look.

The engine runs in its own environment (scripts/install_sglang_cpu.sh), as it would in production.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import httpx

from plait.errors import EngineUnavailable
from plait_rollout.sglang.ranks import LOADER
from plait_rollout.sglang.spool import VARIABLE, Spool

_ROOT: Final = Path(__file__).parents[3]
_SHIM: Final = _ROOT / "rollout_agent" / "sglang_cpu_site"

# A CPU engine without kernels of its own: torch's attention, no graphs, no overlap.
_FLAGS: Final = (
    "--device", "cpu", "--dtype", "bfloat16", "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch", "--disable-cuda-graph", "--disable-overlap-schedule",
    "--grammar-backend", "none", "--skip-server-warmup", "--max-total-tokens", "4096",
    "--max-running-requests", "16", "--log-level", "warning",
)  # fmt: skip


@dataclass(frozen=True)
class RunningEngine:
    """A started engine.

    Attributes:
        url: of its HTTP server.
        spool: folder that its ranks share with an adapter.
        pid: of its main process, which leads its process group.
        log: what it prints.
    """

    url: str
    spool: Path
    pid: int
    log: Path
    _process: "subprocess.Popen[bytes]"

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Ends the whole group and waits for it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                break
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()


def launch_engine(
    model_path: Path,
    *,
    tp: int = 1,
    spool: Path,
    venv: Path = _ROOT / ".venv-sglang",
    port: int | None = None,
    log: Path | None = None,
    extra: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    wait_seconds: float = 300,
) -> RunningEngine:
    """Starts an engine and waits until it serves.

    Args:
        model_path: a Hugging Face directory.
        tp: tensor-parallel ranks.
        spool: made if missing; give each engine its own.
        venv: environment that holds SGLang.
        port: a free one by default.
        log: `SPOOL/engine.log` by default.
        extra: more of SGLang's arguments; more loaders as `--custom-weight-loader`'s.
        environment: added to this process's own.
    Raises:
        EngineUnavailable: it died, or doesn't serve in time; with the end of its log.
    """
    Spool(spool).prepare()
    port = port or _free_port()
    log = log or spool / "engine.log"
    command = [
        str(venv / "bin" / "python"), "-m", "sglang.launch_server",
        "--model-path", str(model_path), "--host", "127.0.0.1", "--port", str(port),
        "--tp-size", str(tp), *_FLAGS, *_with_loader(extra),
    ]  # fmt: skip
    with log.open("ab") as output:
        process = _start(command, _environment(tp, spool, environment), output)
    engine = RunningEngine(f"http://127.0.0.1:{port}", spool, process.pid, log, process)
    deadline = time.monotonic() + wait_seconds
    while not _serves(engine.url):
        if not engine.is_alive or time.monotonic() > deadline:
            engine.stop()
            end = log.read_text(errors="replace")[-2000:]
            raise EngineUnavailable(f"the engine on {model_path} doesn't serve; its log: {end}")
        time.sleep(0.2)
    return engine


def _with_loader(extra: Sequence[str]) -> list[str]:
    """SGLang takes all loaders after one flag."""
    rest = list(extra)
    loaders = [LOADER]
    if "--custom-weight-loader" in rest:
        at = rest.index("--custom-weight-loader")
        end = next((i for i in range(at + 1, len(rest)) if rest[i].startswith("--")), len(rest))
        loaders += rest[at + 1 : end]
        del rest[at:end]
    return [*rest, "--custom-weight-loader", *loaders]


def _environment(tp: int, spool: Path, more: Mapping[str, str] | None) -> dict[str, str]:
    environment = {**os.environ, **(more or {})}
    paths = [str(_SHIM), environment.get("PYTHONPATH", "")]
    environment |= {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        VARIABLE: str(spool.resolve()),
    }
    if tp > 1:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp)))
    return environment


def _start(
    command: list[str], environment: Mapping[str, str], output: IO[bytes]
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _serves(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
