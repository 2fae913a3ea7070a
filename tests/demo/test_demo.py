"""The whole demo without SGLang, as `NO_ENGINE=1 make demo` runs it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

_WITHIN_S = 500.0


@pytest.fixture(name="cache", scope="module")
def make_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def start_demo(folder: Path, cache: Path) -> "subprocess.Popen[str]":
    plait = str(Path(sys.executable).with_name("plait"))
    return subprocess.Popen(
        [plait, "demo", "--json", "--cache", str(cache), "--folder", str(folder)],
        env={**os.environ, "MODEL": "tiny", "NO_ENGINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def processes_of(folder: Path) -> list[str]:
    """Processes that a folder is named to, by argument or by environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            told = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if any(str(folder).encode() in text for text in told):
            found.append(told[0].replace(b"\0", b" ").decode(errors="replace"))
    return found


def passed(summary: dict[str, Any]) -> dict[str, bool]:
    return {proof["claim"]: proof["passed"] for proof in summary["proofs"]}


def test_every_proof_holds_and_nothing_is_left_running(tmp_path: Path, cache: Path) -> None:
    demo = start_demo(tmp_path, cache)
    output, errors = demo.communicate(timeout=_WITHIN_S)

    assert demo.returncode == 0, errors
    summary = json.loads(output)
    assert summary["passed"]
    assert all(passed(summary).values())
    assert all(proof["checks"] for proof in summary["proofs"])
    assert [row["seq"] for row in summary["versions"]] == list(range(2, 10))
    assert all(0 < row["density"] < 0.1 for row in summary["versions"])
    assert all(row["ratio"] > 10 for row in summary["versions"])
    assert processes_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_byte_in_the_store_makes_it_fail_and_say_which_proof(
    tmp_path: Path, cache: Path
) -> None:
    demo = start_demo(tmp_path, cache)
    try:
        _damage_first_chunk(tmp_path, demo)
        output, errors = demo.communicate(timeout=_WITHIN_S)
    finally:
        demo.terminate()
        demo.wait()

    assert demo.returncode == 1, errors
    proofs = {proof["claim"]: proof for proof in json.loads(output)["proofs"]}
    failed = [claim for claim, proof in proofs.items() if not proof["passed"]]
    assert any("plait verify" in claim for claim in failed)
    # What was moved before, from undamaged copies, is still proven.
    assert proofs["both engines prove every version by its fingerprint, bit for bit"]["passed"]
    assert processes_of(tmp_path) == []


def test_an_interrupted_demo_stops_what_it_started(tmp_path: Path, cache: Path) -> None:
    demo = start_demo(tmp_path, cache)
    try:
        _wait_until(demo, lambda: len(processes_of(tmp_path)) >= 2)
        demo.terminate()
        demo.communicate(timeout=_WITHIN_S)
    finally:
        demo.kill()
        demo.wait()

    assert demo.returncode != 0
    assert processes_of(tmp_path) == []


def _damage_first_chunk(folder: Path, demo: "subprocess.Popen[str]") -> None:
    """Flips one bit of the first stored delta, once both followers have their copy of it."""

    def chunk() -> Path | None:
        stored = sorted(folder.glob("run-*/registry/**/sha256/*/*"))
        for path in stored:
            digest = path.name.split("-")[0]
            copies = list(folder.glob(f"run-*/engine-*/cache/objects/*/{digest}"))
            if len(copies) == 2:
                return path
        return None

    _wait_until(demo, lambda: chunk() is not None)
    path = chunk()
    assert path is not None
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def _wait_until(demo: "subprocess.Popen[str]", ready: Any) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while not ready():
        assert demo.poll() is None, demo.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
