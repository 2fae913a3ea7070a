"""The codec on one thread and on two, at several densities."""

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from benchmarks.entropy import exponent_bytes, independent_bytes
from benchmarks.formats import format_section
from benchmarks.language_model import LanguageModel
from benchmarks.report import Section
from benchmarks.stored import (
    Encoded,
    apply_all,
    apply_among,
    decode,
    decode_among,
    encode,
    encode_among,
    encoded,
)
from benchmarks.timing import cpu_seconds, wall_seconds
from benchmarks.workload import Step, Workload
from plait.codec import FrameDelta, detect, increment_on, negate, read_chunk
from plait.fingerprint import ZERO
from plait.weights import ArrayWeights, fingerprint_weights
from plait.workers import Workers

DENSITIES: Final = (0.003, 0.01, 0.02, 0.04, 0.10)


def codec_sections() -> list[Section]:
    """Sizes, speeds and other formats, on real steps and on synthetic ones."""
    model, workload = LanguageModel(), Workload()
    real = (
        f"SmolLM2-135M ({model.layout.total_elements:,} elements): steps of AdamW on policy "
        "gradients of real backward passes on the topics of Python's help()"
    )
    synthetic = (
        f"Shaped like Qwen3-0.6B ({workload.layout.total_elements:,} elements: 3 of its 28 layers, "
        "an eighth of its vocabulary): AdamW on synthetic gradients"
    )
    return [
        *_sections(real, list(model.steps(DENSITIES))),
        *_sections(synthetic, list(workload.steps(DENSITIES))),
    ]


def _sections(title: str, steps: list[Step]) -> list[Section]:
    held = [(step, encoded(step)) for step in steps]
    return [
        Section(
            f"Sizes. {title}",
            "Element density: changed elements over all; byte density: changed bytes over all. "
            "Stored: chunk files and manifest. Limits: the entropy of this very step if elements "
            "changed independently and alike; and if that depended on the tensor and the old "
            "weight's exponent. Budgets at 1 %: 1.25 B per changed element; planes and stored "
            "within 2 % of the limit.",
            ["element density", "byte density", "learning rate", "stored bytes", "B per changed",
             "dense / stored", "limit, B per changed", "planes / limit", "stored / limit",
             "exponent limit, B per changed"],
            [_sizes(step, found) for step, found in held],
        ),
        Section(
            f"Speeds. {title}",
            "Dense bytes of one version per processor second on one thread, over what memcpy does "
            "in the same run (best of five). Encode: detection, planes, zstd, chunk files, "
            "digests. Decode + apply: chunk digest, planes, scatter; the proof reads beside it "
            "compute the increment on the live weights. On two threads: the same work shared out "
            "between two workers, wall clock, over one thread's memcpy; each on a CPU of its own, "
            "and beside it where the system puts them. Budgets at 1 %: encode 0.33, "
            "decode + apply 1.00.",
            ["element density", "memcpy GB/s", "encode / memcpy", "of it detect",
             "decode + apply / memcpy", "proof reads / memcpy", "fingerprint pass / memcpy",
             "encode, 2 threads", "not pinned", "decode + apply, 2 threads", "not pinned",
             "fingerprint, 2 threads"],
            [_speeds(step, found) for step, found in held],
        ),
        format_section(title, held),
    ]  # fmt: skip


def _sizes(step: Step, found: Encoded) -> list[str]:
    changed = found.manifest.statistics.changed_elements
    limit = independent_bytes(step.old, step.new)
    planes = sum(
        frame.stored_size for chunk in found.chunks for frame in read_chunk(chunk.data).frames
    )
    return [
        f"{step.density:.2%}",
        f"{step.byte_density:.2%}",
        f"{step.learning_rate:.1e}",
        f"{found.stored_bytes:,}",
        f"{found.stored_bytes / changed:.3f}",
        f"{step.old.layout.dense_bytes / found.stored_bytes:.0f}x",
        f"{limit / changed:.3f}",
        f"{planes / limit:.3f}",
        f"{found.stored_bytes / limit:.3f}",
        f"{exponent_bytes(step.old, step.new) / changed:.3f}",
    ]


def _speeds(step: Step, found: Encoded) -> list[str]:
    dense = step.old.layout.dense_bytes
    source = np.concatenate([step.old.bits(t.name) for t in step.old.layout.tensors])
    copy = np.empty_like(source)
    memcpy = cpu_seconds(lambda: np.copyto(copy, source))
    encoding = cpu_seconds(lambda: encode(step, found.cut))
    detecting = cpu_seconds(lambda: [detect(f, step.old, step.new) for f in found.cut.frames])
    live = ArrayWeights(
        step.old.layout, {t.name: step.old.bits(t.name).copy() for t in step.old.layout.tensors}
    )
    deltas = decode(found)
    # There and back, so that each run starts from the same weights; half of it counts.
    back = [(number, negate(delta)) for number, delta in deltas]
    applying = cpu_seconds(lambda: apply_all(found.cut, live, [*deltas, *back]))
    decoding = cpu_seconds(lambda: decode(found)) + applying / 2
    proving = cpu_seconds(
        lambda: sum((increment_on(found.cut.frames[i], live, d) for i, d in deltas), ZERO)
    )
    reading = cpu_seconds(lambda: fingerprint_weights(step.old, threads=1))
    return [
        f"{step.density:.2%}",
        f"{dense / memcpy / 1e9:.1f}",
        f"{memcpy / encoding:.2f}",
        f"{detecting / encoding:.0%}",
        f"{memcpy / decoding:.2f}",
        f"{memcpy / proving:.2f}",
        f"{memcpy / reading:.2f}",
        *_two_threads(step, found, live, deltas, back, lambda: np.copyto(copy, source)),
    ]


def _two_threads(
    step: Step,
    found: Encoded,
    live: ArrayWeights,
    deltas: list[tuple[int, FrameDelta]],
    back: list[tuple[int, FrameDelta]],
    copying: Callable[[], object],
) -> list[str]:
    memcpy = wall_seconds(copying)
    encoding: list[float] = []
    decoding: list[float] = []
    for pinned in (True, False):
        with Workers(2, pinned=pinned) as workers:
            encoding.append(wall_seconds(partial(encode_among, workers, step, found.cut)))
            applying = wall_seconds(partial(_there_and_back, workers, found, live, deltas, back))
            decoding.append(wall_seconds(partial(decode_among, workers, found)) + applying / 2)
    reading = wall_seconds(lambda: fingerprint_weights(step.old, threads=2))
    return [f"{memcpy / seconds:.2f}" for seconds in (*encoding, *decoding, reading)]


def _there_and_back(
    workers: Workers,
    found: Encoded,
    live: ArrayWeights,
    deltas: list[tuple[int, FrameDelta]],
    back: list[tuple[int, FrameDelta]],
) -> None:
    for part in (deltas, back):
        apply_among(workers, found.cut, live, part)
