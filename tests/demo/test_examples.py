"""The example scripts, run in the order in which a reader would run them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait_demo.processes import Child, free_port, plait_command

_EXAMPLES = Path(__file__).parents[2] / "examples"
_WITHIN_S = 300.0


@pytest.fixture(name="registry")
def serve_registry(tmp_path: Path) -> Iterator[str]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    log = tmp_path / "registry.log"
    data = str(tmp_path / "registry")
    child = Child(plait_command("serve", "--data", data, "--port", str(port)), log=log)
    try:
        child.wait_until(lambda: "serving on" in log.read_text(), within_s=_WITHIN_S)
        yield url
    finally:
        child.stop()


def run_example(name: str, *, url: str, folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(_EXAMPLES / name)],
        cwd=folder,
        env={**os.environ, "PLAIT_URL": url, "PLAIT_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_loop_publishes_and_a_module_follows_to_any_version(
    registry: str, tmp_path: Path
) -> None:
    published = run_example("publish_from_a_training_loop.py", url=registry, folder=tmp_path)
    assert published[-1].startswith("toy@6: ")

    followed = run_example("follow_into_a_module.py", url=registry, folder=tmp_path)
    versions = [line.split("version ")[1].split(",")[0] for line in followed]
    answers = [line.split("answer ")[1] for line in followed]
    assert versions == ["1", "6", "4"]
    assert len(set(answers)) == 3


def test_a_trainer_publishes_by_its_callback(registry: str, tmp_path: Path) -> None:
    published = run_example("publish_from_a_trainer.py", url=registry, folder=tmp_path)
    assert published[-1].startswith("tiny-llama@4: step 6, ")
