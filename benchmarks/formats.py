"""The same steps in other published formats."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from benchmarks.entropy import exponent_bytes, independent_bytes
from benchmarks.peers import PEERS
from benchmarks.report import Section
from benchmarks.stored import Encoded, apply_all, decode, encode
from benchmarks.timing import cpu_seconds, peak_bytes
from benchmarks.workload import Step
from plait.weights import ArrayWeights

_RUNS: Final = 2
_MEASURED: Final = 4

Lines = dict[str, dict[str, float]]


def format_section(title: str, held: list[tuple[Step, Encoded]]) -> Section:
    """Size, speed and memory of plait and of every emulated format."""
    lines: Lines = {}
    rows = [row for step, found in held for row in _rows(lines, step, found)]
    return Section(
        f"Formats. {title}",
        "Other systems' formats, emulated from their descriptions in numpy, without their "
        "metadata. Processor time of one thread, as a share of memcpy's speed. Memory: by how much "
        "the process's resident peak rises, beyond the two versions while encoding (what is "
        "stored is held at its end), and beyond the live weights and what is stored while "
        "decoding; over one dense version.",
        ["element density", "byte density", "format", "B per changed", "dense / stored",
         "times plait", "encode / memcpy", "decode / memcpy", "encode memory / dense",
         "decode memory / dense"],
        rows,
        {title.split(" (")[0]: lines},
    )  # fmt: skip


def _rows(lines: Lines, step: Step, found: Encoded) -> list[list[str]]:
    layout = step.old.layout
    changed = found.manifest.statistics.changed_elements
    source = np.concatenate([step.old.bits(t.name) for t in layout.tensors])
    copy = np.empty_like(source)
    memcpy = cpu_seconds(lambda: np.copyto(copy, source))
    rows = []

    def add(name: str, size: float, speeds: Sequence[str] = ()) -> None:
        lines.setdefault(name, {})[f"{step.density:.6f}"] = round(size / changed, 4)
        rows.append([
            f"{step.density:.2%}", f"{step.byte_density:.2%}", name, f"{size / changed:.3f}",
            f"{layout.dense_bytes / size:.1f}x", f"{size / found.stored_bytes:.2f}",
            *(speeds or [""] * _MEASURED),
        ])  # fmt: skip

    def measured(encoding: Callable[[], object], decoding: Callable[[], object]) -> list[str]:
        return [
            f"{memcpy / cpu_seconds(encoding, runs=_RUNS):.3f}",
            f"{memcpy / cpu_seconds(decoding, runs=_RUNS):.3f}",
            f"{peak_bytes(encoding) / layout.dense_bytes:.3f}",
            f"{peak_bytes(decoding) / layout.dense_bytes:.3f}",
        ]

    live = _copy(step.old)
    add("limit: tensor and exponent", exponent_bytes(step.old, step.new))
    add("limit: independent", independent_bytes(step.old, step.new))
    add(
        "plait", found.stored_bytes,
        measured(
            lambda: encode(step, found.cut), lambda: apply_all(found.cut, live, decode(found))
        ),
    )  # fmt: skip
    for peer in PEERS:
        stored = peer.encode(step.old, step.new)
        live = _copy(step.old)
        peer.decode(stored, live)
        for tensor in layout.tensors:
            if not np.array_equal(live.bits(tensor.name), step.new.bits(tensor.name)):
                raise AssertionError(f"{peer.name} doesn't reproduce {tensor.name}")
        add(peer.name, sum(map(len, stored)), measured(
            lambda: peer.encode(step.old, step.new),  # noqa: B023
            lambda: peer.decode(stored, live),  # noqa: B023
        ))  # fmt: skip
    return rows


def _copy(weights: ArrayWeights) -> ArrayWeights:
    names = [tensor.name for tensor in weights.layout.tensors]
    return ArrayWeights(weights.layout, {name: weights.bits(name).copy() for name in names})
