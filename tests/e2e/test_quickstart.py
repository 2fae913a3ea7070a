"""The quickstart's Python, run as it is printed."""

import re
from pathlib import Path
from typing import Any

import pytest

from plait_rollout import Follower
from tests.e2e.test_trainer_to_module import serving_module
from tests.rollout_agent.waiting import until
from tests.server.processes import registry_process
from tests.trainer_agent.reading import assert_bits_equal
from tests.trainer_agent.tiny_models import Run

QUICKSTART = Path(__file__).parents[2] / "docs/quickstart.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", QUICKSTART.read_text(), flags=re.DOTALL)


def test_the_quickstart_trains_publishes_and_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    run, served = Run(), serving_module()
    names: dict[str, Any] = {
        "model": run.model,
        "optimizer": run.optimizer,
        "batches": range(3),
        "train_step": lambda model, optimizer, batch: run.step(),
        "module": served,
    }
    with registry_process(tmp_path) as registry:
        trains, follows = blocks()
        exec(trains.replace("http://127.0.0.1:8400", registry.url), names)  # noqa: S102
        exec(follows.replace("http://127.0.0.1:8400", registry.url), names)  # noqa: S102
        follower: Follower = names["follower"]
        try:
            until(lambda: follower.status().seq == 3)
        finally:
            follower.stop()
            names["client"].close()
    assert_bits_equal(dict(served.state_dict()), run.expected())
