"""`plait follow --engine`: a real SGLang engine, kept at a channel's head by the command line."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from plait.tensors import bits_of
from plait_client.registry import RegistryClient
from plait_rollout.sglang.launch import RunningEngine, launch_engine
from tests.sglang.tiny import make_tiny, read_state

from .line import Line
from .registry_process import RegistryProcess
from .states import State, copy_of
from .waiting import until

pytestmark = pytest.mark.sglang
PLAIT = Path(sys.executable).with_name("plait")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    folder = tmp_path_factory.mktemp("engine")
    running = launch_engine(make_tiny(folder / "model"), spool=folder / "spool")
    yield running
    running.stop()


def a_little_changed(state: State, step: int) -> State:
    after = copy_of(state)
    for tensor in after.values():
        bits_of(tensor)[step::17] += 1
    return after


def stamp_of_a_sample(engine: RunningEngine) -> str:
    body = {"input_ids": [10, 11, 12], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    answer = httpx.post(f"{engine.url}/generate", json=body, timeout=60).raise_for_status().json()
    return str(answer["meta_info"]["weight_version"])


@contextmanager
def following(
    registry: RegistryProcess, cache: Path, *arguments: str
) -> Iterator[Callable[[], dict[str, object]]]:
    """A running `plait follow`; yields a look at its status."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PLAIT_")}
    process = subprocess.Popen(
        [str(PLAIT), "follow", *arguments, "--listen", "0"],
        env=clean | {"PLAIT_URL": registry.url, "PLAIT_CACHE": str(cache)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        url = process.stderr.readline().strip().removeprefix("local API at ")
        yield lambda: dict(httpx.get(f"{url}/status", timeout=30).json())
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


def test_the_command_line_moves_a_live_engine_forward_back_and_by_reload(
    engine: RunningEngine,
    client: RegistryClient,
    shared_registry: RegistryProcess,
    tmp_path: Path,
) -> None:
    first = read_state(engine.spool.parent / "model")
    line = Line(client, "live-engine", first, whole=True).start()
    live = ("live-engine", "--engine", engine.url, "--spool", str(engine.spool), "--name", "e")
    with following(shared_registry, tmp_path / "cache", *live) as status:
        until(lambda: bool(status()["ready"]), seconds=120)
        assert stamp_of_a_sample(engine) == "live-engine@1#1"
        line.publish(a_little_changed(line.head, 1), items=1 << 20)
        line.publish(a_little_changed(line.head, 2), items=1 << 20)
        until(lambda: status()["seq"] == 3, seconds=120)
        assert (status()["way"], status()["fallback"]) == ("in-place", "")
        assert stamp_of_a_sample(engine) == "live-engine@3#3"
        line.move(1)
        until(lambda: status()["generation"] == 4 and status()["seq"] == 1, seconds=120)
        assert stamp_of_a_sample(engine) == "live-engine@1#4"
    line.publish(a_little_changed(line.states[3], 3), items=1 << 20)
    with following(shared_registry, tmp_path / "cache", *live, "--mode", "reload") as status:
        until(lambda: bool(status()["ready"]), seconds=120)
        assert (status()["way"], status()["seq"]) == ("reload", 4)
        assert stamp_of_a_sample(engine) == "live-engine@4#5"
