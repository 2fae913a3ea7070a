"""Followers killed with SIGKILL in the middle of a move: the next run finds out what is held."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.weights import fingerprint_weights
from plait_client.checkpoint import CheckpointFolder
from plait_client.fetch import Fetcher
from plait_rollout.directory import DirectoryReplica
from plait_rollout.follower import Follower

from .line import Line
from .module_follower import catch_up, shared_state
from .registry_process import RegistryProcess
from .states import fingerprint_of, same_bits

NewLine = Callable[..., Line]
ROOT = Path(__file__).parents[2]
PLAIT = Path(sys.executable).with_name("plait")


def fingerprint_in(folder: Path) -> str:
    return str(fingerprint_weights(CheckpointFolder(folder)))


def kill(command: list[str], **environment: str) -> None:
    """Runs a command that has to end by SIGKILL."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PLAIT_")}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=clean | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("failpoint", ["move.journalled", "move.flushed", "move.stamped"])
def test_a_directory_follower_killed_in_a_move_is_repaired_by_the_next_run(
    new_line: NewLine,
    shared_registry: RegistryProcess,
    fetcher: Fetcher,
    tmp_path: Path,
    failpoint: str,
) -> None:
    line = new_line(whole=True)
    folder = tmp_path / "d"

    def follower() -> Follower:
        replica = DirectoryReplica(folder, fetcher)
        return Follower(fetcher, replica, policy=line.policy, name="d")

    assert follower().catch_up().seq == 1
    line.publish()
    kill(
        [str(PLAIT), "follow", line.policy, "--dir", str(folder), "--once"],
        PLAIT_URL=shared_registry.url,
        PLAIT_CACHE=str(tmp_path / "cache"),
        PLAIT_FAILPOINT=failpoint,
    )
    line.publish()
    status = follower().catch_up()
    assert (status.seq, status.ready, status.way) == (3, True, "directory")
    assert fingerprint_in(folder) == str(fingerprint_of(line.head))


def kill_module(registry: RegistryProcess, line: Line, folder: Path, *, after: int) -> None:
    module = "tests.rollout_agent.module_follower"
    kill([sys.executable, "-m", module, registry.url, line.policy, str(folder), str(after)])


def test_a_module_follower_killed_in_an_apply_is_asked_by_content_and_reloaded(
    new_line: NewLine, shared_registry: RegistryProcess, tmp_path: Path
) -> None:
    """Its weights lie in shared memory, as an engine's do that outlives its agent: torn."""
    line = new_line(whole=True)
    line.publish(items=200)
    kill_module(shared_registry, line, tmp_path, after=3)
    torn = shared_state(tmp_path)
    assert not same_bits(torn, line.first)
    assert not same_bits(torn, line.head)
    status = catch_up(line.client, line.policy, tmp_path)
    assert (status.seq, status.ready) == (2, True)
    assert status.fallback.startswith("reloaded: ")
    assert same_bits(shared_state(tmp_path), line.head)


def test_a_module_follower_killed_before_the_first_write_goes_on_by_deltas(
    new_line: NewLine, shared_registry: RegistryProcess, tmp_path: Path
) -> None:
    line = new_line(whole=True)
    line.publish(items=200)
    kill_module(shared_registry, line, tmp_path, after=0)
    assert same_bits(shared_state(tmp_path), line.first)
    status = catch_up(line.client, line.policy, tmp_path)
    assert (status.seq, status.fallback) == (2, "")
    assert same_bits(shared_state(tmp_path), line.head)
