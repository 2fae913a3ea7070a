"""A step as a publisher stores it, and as a follower reads it."""

from dataclasses import dataclass

from benchmarks.workload import Step
from plait.codec import (
    Chunk,
    EncodedFrame,
    FrameDelta,
    apply,
    decode_delta,
    decode_deltas,
    detect,
    encode_delta,
    pack_chunks,
    read_chunk,
)
from plait.cut import Cut, FrameSpec, plain_cut
from plait.manifest import Manifest, Statistics
from plait.weights import ArrayWeights, fingerprint_weights
from plait.workers import Workers


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


def encode_among(workers: Workers, step: Step, cut: Cut) -> list[Chunk]:
    """As `encode`, each frame by a worker."""

    def encode_one(numbered: tuple[int, FrameSpec]) -> EncodedFrame:
        return encode_delta(*numbered, detect(numbered[1], step.old, step.new))

    frames = workers.map(encode_one, enumerate(cut.frames))
    return list(pack_chunks(frame for frame in frames if frame.count))


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


def decode(found: Encoded) -> list[tuple[int, FrameDelta]]:
    """Every frame's delta, from chunk files whose digests are checked."""
    return [
        (frame.number, decode_delta(frame, found.cut.frames[frame.number]))
        for chunk in found.chunks
        for frame in read_chunk(chunk.data, entry=chunk.entry).frames
    ]


def decode_among(workers: Workers, found: Encoded) -> list[tuple[int, FrameDelta]]:
    """As `decode`, each frame by a worker, or its blocks where there are fewer frames."""
    frames = [
        frame
        for chunk in found.chunks
        for frame in read_chunk(chunk.data, entry=chunk.entry).frames
    ]
    deltas = decode_deltas([(frame, found.cut.frames[frame.number]) for frame in frames], workers)
    return [(frame.number, delta) for frame, delta in zip(frames, deltas, strict=True)]


def apply_among(
    workers: Workers, cut: Cut, live: ArrayWeights, deltas: list[tuple[int, FrameDelta]]
) -> None:
    """As `apply_all`, each frame by a worker."""
    workers.map(lambda change: apply(cut.frames[change[0]], live, change[1]), deltas)


def apply_all(cut: Cut, live: ArrayWeights, deltas: list[tuple[int, FrameDelta]]) -> None:
    for number, delta in deltas:
        apply(cut.frames[number], live, delta)
