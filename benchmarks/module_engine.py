"""Moving a live torch module: what happens beside generation, and what pauses it."""

import statistics
import tempfile
from pathlib import Path
from typing import Final

import torch

from benchmarks.report import Section
from benchmarks.stored import encoded
from benchmarks.timing import percentile
from benchmarks.workload import Workload
from plait_rollout import Move, MoveStep, TorchModuleEngine
from plait_rollout.engine import Direction

_DENSITY: Final = 0.01
_MOVES: Final = 20


def module_section() -> Section:
    """Forward and back, by one delta at 1 %, twenty times each way."""
    (step,) = Workload().steps((_DENSITY,))
    found = encoded(step)
    layout, manifest = step.old.layout, found.manifest
    assert manifest.base is not None
    tensors = {
        t.name: torch.from_numpy(step.old.bits(t.name).copy()).view(torch.bfloat16).view(t.shape)
        for t in layout.tensors
    }
    engine = TorchModuleEngine(tensors)
    engine.attach(layout)
    stages, pauses = [], []
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, chunk in enumerate(found.chunks):
            paths.append(Path(folder) / str(number))
            paths[-1].write_bytes(chunk.data)
        ways: tuple[Direction, Direction] = ("forward", "reverse")
        for direction in ways * _MOVES:
            move_step = MoveStep(manifest, direction, tuple(paths))
            move = Move(
                layout, found.cut, move_step.base, move_step.target, (move_step,), direction
            )
            stages.append(engine.stage(move).seconds)
            pauses.append(engine.apply().paused_seconds)
    return Section(
        "Moving a live torch module",
        f"{layout.total_elements:,} elements, {step.density:.2%} changed, forward and back "
        f"{_MOVES} times, wall clock. Staged beside generation: chunks read, decoded, compared "
        "with the live bits. Paused: scatter, re-read of the touched words, stamp.",
        ["what", "median", "p90"],
        [
            [name, f"{1000 * statistics.median(t):.1f} ms", f"{1000 * percentile(t, 0.9):.1f} ms"]
            for name, t in (("staged", stages), ("paused", pauses))
        ],
    )
