"""The codec on one thread, at several densities."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.peers import PEERS, iid_limit_bytes
from benchmarks.report import Section
from benchmarks.timing import cpu_seconds
from benchmarks.workload import Step, Workload
from plait.codec import (
    Chunk,
    FrameDelta,
    apply,
    decode_delta,
    detect,
    encode_delta,
    increment_on,
    negate,
    pack_chunks,
    read_chunk,
)
from plait.cut import Cut, plain_cut
from plait.fingerprint import ZERO
from plait.manifest import Manifest, Statistics
from plait.weights import ArrayWeights, fingerprint_weights

DENSITIES: Final = (0.003, 0.01, 0.02, 0.04, 0.10)


@dataclass(frozen=True)
class Encoded:
    """One step's chunks, and the manifest that names them."""

    cut: Cut
    chunks: list[Chunk]
    manifest: Manifest

    @property
    def stored_bytes(self) -> int:
        """What a follower fetches that has the cut already."""
        return sum(chunk.size for chunk in self.chunks) + len(self.manifest.data)


def encode(step: Step, cut: Cut) -> list[Chunk]:
    """Detects and encodes all frames, and packs them into chunk files with their digests."""
    deltas = ((i, frame, detect(frame, step.old, step.new)) for i, frame in enumerate(cut.frames))
    return list(pack_chunks(encode_delta(i, frame, d) for i, frame, d in deltas if d.count))


def encoded(step: Step) -> Encoded:
    """As a publisher would commit it."""
    layout = step.old.layout
    cut = plain_cut(layout, for_anchor=False)
    chunks = encode(step, cut)
    changed = round(step.density * layout.total_elements)
    manifest = Manifest(
        kind="delta",
        layout=layout.digest,
        cut=cut.digest,
        base=fingerprint_weights(step.old),
        target=fingerprint_weights(step.new),
        chunks=tuple(chunk.entry for chunk in chunks),
        statistics=Statistics(
            changed, 2 * changed, layout.total_elements, layout.dense_bytes,
            sum(chunk.size for chunk in chunks),
        ),
    )  # fmt: skip
    return Encoded(cut, chunks, manifest)


def codec_sections() -> list[Section]:
    """Sizes, speeds, and peers on the same steps."""
    workload = Workload()
    sizes, speeds, peers = [], [], []
    for step in workload.steps(DENSITIES):
        found = encoded(step)
        sizes.append(_sizes(step, found))
        speeds.append(_speeds(step, found))
        peers.append(_peers(step, found))
    dense = workload.layout.dense_bytes
    return [
        Section(
            "Codec: sizes",
            f"A synthetic BF16 model of {workload.layout.total_elements:,} elements ({dense:,} "
            "bytes), one AdamW step. Element density: changed elements over all; byte density: "
            "changed bytes over all. Stored: chunk files and manifest. The limit is the entropy of "
            "this very step if elements changed independently and alike. Budgets at 1 %: 1.25 B "
            "per changed element; planes and stored within 2 % of the limit.",
            ["element density", "byte density", "learning rate", "stored bytes", "B per changed",
             "dense / stored", "limit, B per changed", "planes / limit", "stored / limit"],
            sizes,
        ),
        Section(
            "Codec: speeds, one thread",
            "Dense bytes of one version per processor second, over what memcpy does in the same "
            "run (best of seven). Encode: detection, planes, zstd, chunk files, digests. Decode + "
            "apply: chunk digest, planes, scatter; the proof reads beside it compute the "
            "increment on the live weights. Budgets at 1 %: encode 0.33, decode + apply 1.00.",
            ["element density", "memcpy GB/s", "encode / memcpy", "of it detect",
             "decode + apply / memcpy", "proof reads / memcpy", "fingerprint pass / memcpy"],
            speeds,
        ),
        Section(
            "The same steps in other published formats (emulated, without their metadata)",
            "Bytes per changed element, and how many times plait's stored bytes.",
            ["element density", "plait", *PEERS],
            peers,
        ),
    ]  # fmt: skip


def _sizes(step: Step, found: Encoded) -> list[str]:
    changed = found.manifest.statistics.changed_elements
    limit = iid_limit_bytes(step.old, step.new)
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
    applying = cpu_seconds(lambda: _apply(found.cut, live, [*deltas, *back]))
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
    ]


def decode(found: Encoded) -> list[tuple[int, FrameDelta]]:
    """Every frame's delta, from chunk files whose digests are checked."""
    return [
        (frame.number, decode_delta(frame, found.cut.frames[frame.number]))
        for chunk in found.chunks
        for frame in read_chunk(chunk.data, entry=chunk.entry).frames
    ]


def _apply(cut: Cut, live: ArrayWeights, deltas: list[tuple[int, FrameDelta]]) -> None:
    for number, delta in deltas:
        apply(cut.frames[number], live, delta)


def _peers(step: Step, found: Encoded) -> list[str]:
    changed = found.manifest.statistics.changed_elements
    row = [f"{step.density:.2%}", f"{found.stored_bytes / changed:.2f}"]
    for size_of in PEERS.values():
        size = size_of(step.old, step.new)
        row.append(f"{size / changed:.2f} ({size / found.stored_bytes:.1f}x)")
    return row
