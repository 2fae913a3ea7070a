"""`plait follow` as an operator runs it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import safetensors.torch

from plait_client.checkpoint import CheckpointFolder
from plait_client.cli import main

from .line import Line
from .registry_process import RegistryProcess
from .states import fresh_state, same_bits
from .waiting import until

NewLine = Callable[..., Line]
PLAIT = Path(sys.executable).with_name("plait")


@pytest.fixture
def environment(shared_registry: RegistryProcess, tmp_path: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PLAIT_")}
    return clean | {"PLAIT_URL": shared_registry.url, "PLAIT_CACHE": str(tmp_path / "cache")}


def plait(environment: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(PLAIT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@contextmanager
def started(environment: dict[str, str], *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [str(PLAIT), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def holds(folder: Path, line: Line, seq: int) -> bool:
    files = [safetensors.torch.load_file(folder / name) for name in CheckpointFolder(folder).files]
    return same_bits({n: t for file in files for n, t in file.items()}, line.states[seq])


def test_once_catches_up_and_says_so(
    new_line: NewLine, environment: dict[str, str], tmp_path: Path
) -> None:
    line = new_line(whole=True)
    line.publish()
    folder = tmp_path / "d"
    done = plait(environment, "follow", line.policy, "--dir", str(folder), "--once")
    assert done.returncode == 0, done.stderr
    assert f"{line.policy}@2 generation 2" in done.stdout
    assert holds(folder, line, 2)
    again = plait(environment, "follow", line.policy, "--dir", str(folder), "--once", "--json")
    assert json.loads(again.stdout)["seq"] == 2
    (replica,) = line.client.replicas(line.policy)
    assert (replica.report.seq, replica.report.engine) == (2, "directory")


@pytest.mark.parametrize("listen", ["\u00b2", "65536", "9" * 5000, "host:"])
def test_a_port_that_is_none_is_wrong_usage(
    new_line: NewLine, environment: dict[str, str], tmp_path: Path, listen: str
) -> None:
    policy = new_line(whole=True).policy
    folder = str(tmp_path / "d")
    done = plait(environment, "follow", policy, "--dir", folder, "--listen", listen)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --listen")


def test_it_follows_until_it_is_told_to_stop(
    new_line: NewLine, environment: dict[str, str], tmp_path: Path
) -> None:
    line = new_line(whole=True)
    folder = tmp_path / "d"
    arguments = ("follow", line.policy, "--dir", str(folder), "--name", "me", "--json")
    with started(environment, *arguments, "--listen", "0") as process:
        assert process.stderr is not None
        url = process.stderr.readline().strip().removeprefix("local API at ")
        until(lambda: httpx.get(f"{url}/ready").status_code == 200)
        line.publish()
        until(lambda: httpx.get(f"{url}/version").json()["seq"] == 2)
        line.move(1)
        until(lambda: httpx.get(f"{url}/version").json()["generation"] == 3)
        until(lambda: httpx.get(f"{url}/version").json()["seq"] == 1)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    status = json.loads(out)
    assert (status["seq"], status["generation"], status["replica"]) == (1, 3, "me")
    assert holds(folder, line, 1)


def test_an_external_line_needs_its_base_once(
    new_line: NewLine, environment: dict[str, str], tmp_path: Path
) -> None:
    line = new_line()
    line.publish()
    folder, base = tmp_path / "d", tmp_path / "base"
    base.mkdir()
    safetensors.torch.save_file(fresh_state(), base / "model.safetensors")
    follow = ("follow", line.policy, "--dir", str(folder), "--once")
    refused = plait(environment, *follow)
    assert (refused.returncode, "--base" in refused.stderr) == (3, True)
    assert plait(environment, *follow, "--base", str(base)).returncode == 0
    line.publish()
    assert plait(environment, *follow).returncode == 0
    assert holds(folder, line, 3)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("p",), 2),
        (("p", "--dir", "d", "--engine", "http://127.0.0.1:9"), 2),
        (("p", "--engine", "http://127.0.0.1:9"), 2),
        (("p", "--dir", "d", "--once", "--mode", "sideways"), 2),
        (("never-published", "--dir", "d", "--once"), 1),
    ],
)
def test_what_cannot_be_meant_is_refused(
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
) -> None:
    placed = [str(tmp_path / "d") if word == "d" else word for word in arguments]
    monkeypatch.setattr("sys.argv", ["plait", "follow", *placed])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == code
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "d").exists()


def test_a_registry_that_is_away_is_exit_code_4(
    environment: dict[str, str], tmp_path: Path
) -> None:
    away = environment | {"PLAIT_URL": "http://127.0.0.1:9"}
    refused = plait(away, "follow", "p", "--dir", str(tmp_path / "d"), "--once", "--json")
    assert (refused.returncode, refused.stdout) == (4, "")
    assert json.loads(refused.stderr.splitlines()[-1])["code"] == "registry_unavailable"


def test_a_follower_whose_thread_ended_ends_the_command(
    new_line: NewLine, environment: dict[str, str], tmp_path: Path
) -> None:
    """Nobody reads what it prints: its thread ends there, and nobody is left waiting for it."""
    line = new_line(whole=True)
    with started(environment, "follow", line.policy, "--dir", str(tmp_path / "d")) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.wait(timeout=120)
        assert "the follower ended" in process.stderr.read()
        assert process.returncode == 1
        process.stdout = None  # closed: there is nothing to drain
    assert holds(tmp_path / "d", line, 1)
