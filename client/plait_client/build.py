"""New files for a version: from an anchor or weights that lie here already, and its deltas."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from plait.codec.algebra import FrameDelta, apply, increment_on
from plait.codec.frames import decode_dense
from plait.cut import FrameSpec
from plait.errors import BaseMismatch, DocumentInvalid, FingerprintMismatch
from plait.fingerprint import Fingerprint
from plait.layout import Layout
from plait.manifest import ChunkEntry, SideFile
from plait.weights import Weights, fingerprint_weights, scatter
from plait.workers import shared
from plait_client.failpoints import failpoint
from plait_client.fetch import FetchedStep, Fetcher
from plait_client.progress import Progress
from plait_client.shards import allocate_checkpoint, copy_weights, write_side_file
from plait_client.steps import added_frames, groups_of


def build_weights(
    folder: Path,
    layout: Layout,
    steps: Sequence[FetchedStep],
    *,
    source: Weights | None,
    expected: Fingerprint,
    progress: Progress,
) -> None:
    """Write a version's weights into an empty folder and prove every one of them.

    Args:
        steps: an anchor and deltas, or deltas from `source`.
        source: weights to begin with; None where the first step is an anchor.
        expected: fingerprint of the result.

    Raises:
        BaseMismatch: `source` isn't what the first delta was made from.
        FingerprintMismatch: the result isn't the version.
        CorruptionError, ChunkInvalid, NoSpace: see those classes.
    """
    written = allocate_checkpoint(folder, layout)
    progress.begin("writing", layout.dense_bytes)
    if source is not None:
        for size in copy_weights(source, written):
            progress.advance(size)
    elif steps and steps[0].step.kind == "anchor":
        write_anchor(steps[0], written, progress)
        steps = steps[1:]
    failpoint("build.base")
    for group in groups_of(steps):
        write_group(group, written)
        failpoint("build.group")
    reached = fingerprint_weights(written)
    if reached != expected:
        raise FingerprintMismatch(
            f"the weights written have fingerprint {reached}, expected {expected}",
            remedy="run `plait verify` on the version: its stored bytes may be damaged",
            expected=str(expected),
            found=str(reached),
        )
    written.flush()


def write_group(group: Sequence[FetchedStep], weights: Weights) -> None:
    """Add a group of deltas to weights, a frame to each worker at a time.

    Raises:
        BaseMismatch: these aren't the weights that the deltas were made from.
        ChunkInvalid, CorruptionError: a chunk isn't what its manifest says.
    """

    def write(change: tuple[FrameSpec, FrameDelta]) -> None:
        frame, delta = change
        found = increment_on(frame, weights, delta)
        if found != delta.increment:
            raise BaseMismatch(
                f"a delta on the way met other weights than it was made from: it adds {found}, "
                f"expected {delta.increment}"
            )
        apply(frame, weights, delta)

    workers, changes = shared(), added_frames(group)
    while held := list(itertools.islice(changes, workers.size)):
        workers.map(write, held)


def write_anchor(step: FetchedStep, weights: Weights, progress: Progress) -> None:
    """Write every frame of an anchor, chunks in parallel.

    Raises:
        DocumentInvalid: its cut leaves words out.
        CorruptionError, ChunkInvalid: a chunk isn't what its manifest says.
    """
    cut = step.cut
    if cut is None:
        if step.layout.total_words:
            raise DocumentInvalid(f"anchor {step.manifest.digest} has no chunks")
        return
    if not cut.covers(step.layout) or len(step.entry_of) != len(cut.frames):
        raise DocumentInvalid(f"anchor {step.manifest.digest} doesn't cover its layout")

    def write(entry: ChunkEntry) -> None:
        for encoded in step.open(entry).frames:
            frame = cut.frames[encoded.number]
            scatter(frame, weights, decode_dense(encoded, frame))
            progress.advance(frame.nbytes)

    shared().map(write, step.manifest.chunks)


def write_side_files(folder: Path, side_files: Sequence[SideFile], fetcher: Fetcher) -> None:
    """Write an anchor's side files into the folder."""
    for side_file in side_files:
        data = fetcher.object(side_file.digest, side_file.size)
        write_side_file(folder, side_file.name, data)
