"""Followers killed with SIGKILL in the middle of a move: the next run finds out what is held."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from plait_client.checkpoint import CheckpointFolder

from .line import Line
from .module_follower import shared_state
from .registry_process import RegistryProcess
from .states import fingerprint_of, same_bits

NewLine = Callable[..., Line]
ROOT = Path(__file__).parents[2]
PLAIT = Path(sys.executable).with_name("plait")


def plait(
    registry: RegistryProcess, cache: Path, *arguments: str, failpoint: str = ""
) -> "subprocess.CompletedProcess[str]":
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PLAIT_")}
    environment |= {"PLAIT_URL": registry.url, "PLAIT_CACHE": str(cache)}
    if failpoint:
        environment["PLAIT_FAILPOINT"] = failpoint
    return subprocess.run(
        [str(PLAIT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def fingerprint_in(folder: Path) -> str:
    from plait.weights import fingerprint_weights

    return str(fingerprint_weights(CheckpointFolder(folder)))


@pytest.mark.parametrize("failpoint", ["move.journalled", "move.flushed", "move.stamped"])
def test_a_directory_follower_killed_in_a_move_is_repaired_by_the_next_run(
    new_line: NewLine, shared_registry: RegistryProcess, tmp_path: Path, failpoint: str
) -> None:
    line = new_line(whole=True)
    follow = ("follow", line.policy, "--dir", str(tmp_path / "d"), "--once", "--json")
    first = plait(shared_registry, tmp_path / "cache", *follow)
    assert first.returncode == 0, first.stderr
    line.publish()
    killed = plait(shared_registry, tmp_path / "cache", *follow, failpoint=failpoint)
    assert killed.returncode == -signal.SIGKILL
    line.publish()
    done = plait(shared_registry, tmp_path / "cache", *follow)
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert (status["seq"], status["ready"], status["way"]) == (3, True, "directory")
    assert fingerprint_in(tmp_path / "d") == str(fingerprint_of(line.head))


def run_module(
    registry: RegistryProcess, line: Line, folder: Path, *more: str
) -> "subprocess.CompletedProcess[str]":
    module = "tests.rollout_agent.module_follower"
    return subprocess.run(
        [sys.executable, "-m", module, registry.url, line.policy, str(folder), *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_module_follower_killed_in_an_apply_is_asked_by_content_and_reloaded(
    new_line: NewLine, shared_registry: RegistryProcess, tmp_path: Path
) -> None:
    """Its weights lie in shared memory, as an engine's do that outlives its agent: torn."""
    line = new_line(whole=True)
    line.publish(items=200)
    killed = run_module(shared_registry, line, tmp_path, "3")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    torn = shared_state(tmp_path)
    assert not same_bits(torn, line.first)
    assert not same_bits(torn, line.head)
    done = run_module(shared_registry, line, tmp_path)
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert (status["seq"], status["ready"]) == (2, True)
    assert status["fallback"].startswith("reloaded: ")
    assert same_bits(shared_state(tmp_path), line.head)


def test_a_module_follower_killed_before_the_first_write_goes_on_by_deltas(
    new_line: NewLine, shared_registry: RegistryProcess, tmp_path: Path
) -> None:
    line = new_line(whole=True)
    line.publish(items=200)
    killed = run_module(shared_registry, line, tmp_path, "0")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert same_bits(shared_state(tmp_path), line.first)
    done = run_module(shared_registry, line, tmp_path)
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert (status["seq"], status["fallback"]) == (2, "")
    assert same_bits(shared_state(tmp_path), line.head)
