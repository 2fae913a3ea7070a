"""A model that doesn't fit in memory is published, checked out and moved all the same."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from plait.layout import Layout, TensorSpec
from plait.weights import fingerprint_weights
from plait_client.checkpoint import CheckpointFolder
from plait_client.shards import allocate_checkpoint
from tests.client.serving import ServedRegistry

HEADROOM: Final = 216 << 20
ROWS: Final = 1 << 17
LAYOUT: Final = Layout.of(
    [
        TensorSpec("embed", "BF16", (ROWS, 1024)),
        TensorSpec("norm", "F32", (1024,)),
        *(TensorSpec(f"layer.{n}", "BF16", (4096, 1024)) for n in range(10)),
    ]
)


@pytest.fixture
def limited(registry: ServedRegistry, tmp_path: Path) -> Callable[..., None]:
    """Runs a verb of tests.client.streaming in a process of its own."""
    environment = os.environ | {
        "MALLOC_ARENA_MAX": "2",
        "OMP_NUM_THREADS": "1",
        "PLAIT_WORKERS": "2",  # each holds a frame
    }

    def run(verb: str, folder: Path, name: str, cache: str) -> None:
        command = [sys.executable, "-m", "tests.client.streaming", registry.url]
        command += [str(tmp_path / cache), str(HEADROOM), verb, str(folder), name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr[-4000:]

    return run


def write_model(folder: Path) -> CheckpointFolder:
    """One slice of noise over and over: as hard to compress as weights, and soon made."""
    folder.mkdir()
    weights = allocate_checkpoint(folder, LAYOUT)
    noise = (np.random.default_rng(0).standard_normal(1 << 20) * 0.02).astype("<f4")
    bf16 = (noise.view("<u4") >> 16).astype("<u2")
    for tensor in LAYOUT.tensors:
        bits = weights.bits(tensor.name)
        source: Any = bf16 if tensor.item_bytes == 2 else noise.view("<u4")
        for start in range(0, bits.size, source.size):
            part = bits[start : start + source.size]
            part[:] = source[: part.size]
    return weights


def test_a_model_larger_than_memory_is_published_checked_out_and_moved(
    tmp_path: Path, policy: str, limited: Callable[..., None]
) -> None:
    assert LAYOUT.dense_bytes > 1.5 * HEADROOM
    weights = write_model(tmp_path / "model")
    first = fingerprint_weights(weights)
    limited("publish", tmp_path / "model", policy, "here")
    for tensor in LAYOUT.tensors:
        weights.bits(tensor.name)[::53] += 1  # every 53rd element: 2 %
    second = fingerprint_weights(weights)
    limited("publish", tmp_path / "model", policy, "here")
    for ref, expected in (("2", second), ("1", first), ("2", second)):
        limited("checkout", tmp_path / "copy", f"{policy}@{ref}", "there")
        assert fingerprint_weights(CheckpointFolder(tmp_path / "copy")) == expected
