"""An agent that is killed in the middle of a move.

`python -m tests.sglang.driver FOLDER URL POINT` takes the engine from A to B and ends itself by
SIGKILL at POINT: before or after one of the calls that a move is made of.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.cut import plain_cut
from plait_rollout.sglang.adapter import SglangEngine
from plait_rollout.sglang.http import SglangApi
from tests.sglang.tiny import changed, layout_of, move_of, read_state, step_between

CALLS = ("pause", "update_from_tensor", "set_weight_version", "resume")
POINTS = [f"{when}:{call}" for call in CALLS for when in ("before", "after")]


def end_at(point: str) -> None:
    when, name = point.split(":")
    call: Callable[..., Any] = getattr(SglangApi, name)

    def fatal(*args: Any, **kwargs: Any) -> Any:
        if when == "after":
            call(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(SglangApi, name, fatal)


def main(folder: Path, url: str, point: str) -> None:
    a = read_state(folder / "a")
    layout = layout_of(a)
    engine = SglangEngine(url, folder / "spool")
    engine.attach(layout)
    step = step_between(folder / "driver-chunks", a, changed(a, seed=1))
    engine.stage(move_of(layout, plain_cut(layout, for_anchor=False), [step], "policy@2#2"))
    end_at(point)
    engine.apply()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
