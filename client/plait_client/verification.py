"""Verify a version: its stored bytes, or a folder that should hold it."""

from dataclasses import dataclass
from pathlib import Path

from plait.codec.chunks import read_chunk
from plait.cut import Cut
from plait.errors import ChunkInvalid, DocumentInvalid, FingerprintMismatch
from plait.fingerprint import ZERO, Fingerprint
from plait.layout import Layout
from plait.manifest import Manifest, Statistics
from plait.weights import fingerprint_weights
from plait.wire import PlanStep, VersionDocument
from plait_client.checkout_folder import refuse_torn
from plait_client.checkpoint import CheckpointFolder
from plait_client.plans import plan_stored
from plait_client.progress import Progress
from plait_client.registry import RegistryClient


@dataclass(frozen=True, slots=True)
class Verification:
    """What was read and found right.

    Attributes:
        manifests, chunks, stored_bytes: read anew from the registry, every digest compared.
        weights: elements of a folder that were read.
    """

    manifests: int
    chunks: int
    stored_bytes: int
    weights: int


def verify_stored(
    client: RegistryClient, version: VersionDocument, progress: Progress
) -> Verification:
    """Read everything that leads to a version, past every cache.

    Documents and chunks must have their digests, frames their checksums, manifests the statistics
    of their frames, and the increments must add up, step by step, to the version's fingerprint.

    Raises:
        DocumentInvalid: a manifest's statistics aren't those of its frames.
        CorruptionError, ChunkInvalid, ObjectMissing: what is damaged or gone.
    """
    plan = plan_stored(client, version.policy, version.version_digest)
    progress.begin("reading", plan.total_bytes)
    reached, chunks, size = ZERO, 0, 0
    for step in plan.steps:
        manifest = client.manifest(step.manifest_digest)
        reached += _verify_step(client, step, manifest, progress)
        chunks += len(manifest.chunks)
        size += manifest.chunk_bytes
    if str(reached) != version.fingerprint:
        raise FingerprintMismatch(
            f"what is stored adds up to {reached}; {version.policy}@{version.seq} has "
            f"{version.fingerprint}",
            expected=version.fingerprint,
            found=str(reached),
        )
    return Verification(len(plan.steps), chunks, size, 0)


def verify_folder(folder: Path, version: VersionDocument) -> Verification:
    """Read every weight of a folder.

    Raises:
        FingerprintMismatch: it doesn't hold the version.
        CheckpointInvalid: it isn't one checkpoint, or a killed checkout waits for its repair.
    """
    refuse_torn(folder)
    weights = CheckpointFolder(folder)
    found = fingerprint_weights(weights)
    if weights.layout.digest != version.layout_digest or str(found) != version.fingerprint:
        raise FingerprintMismatch(
            f"{folder} isn't {version.policy}@{version.seq}: it has layout {weights.layout.digest} "
            f"and fingerprint {found}, expected {version.layout_digest} and {version.fingerprint}",
            remedy="check the version out again, or name the one that the folder should hold",
            expected=version.fingerprint,
            found=str(found),
        )
    return Verification(0, 0, 0, weights.layout.total_elements)


def _verify_step(
    client: RegistryClient, step: PlanStep, manifest: Manifest, progress: Progress
) -> Fingerprint:
    """The step's contribution to the fingerprint; a reverse step subtracts.

    Raises:
        ChunkInvalid: a frame that the cut doesn't have.
        DocumentInvalid: statistics other than those of the frames and the layout.
    """
    layout = client.layout(manifest.layout)
    if manifest.external:
        elements, size = layout.total_elements, layout.dense_bytes
        _check_statistics(manifest, layout, elements, size)
        return manifest.target
    cut: Cut | None = None
    if manifest.cut is not None:
        cut = client.cut(manifest.cut)
        cut.check_against(layout)
    total, elements, size = ZERO, 0, 0
    for entry in manifest.chunks:
        reader = read_chunk(client.chunk(entry.digest, entry.size), entry=entry)
        for frame in reader.frames:
            if cut is None or frame.number >= len(cut.frames):
                raise ChunkInvalid(f"chunk {entry.digest}: the cut has no frame {frame.number}")
            total += frame.increment
            elements += frame.count
            size += frame.count * cut.frames[frame.number].item_bytes
        progress.advance(entry.size)
    _check_statistics(manifest, layout, elements, size)
    for side_file in manifest.side_files:
        client.chunk(side_file.digest, side_file.size)
    return -total if step.kind == "reverse" else total


def _check_statistics(manifest: Manifest, layout: Layout, elements: int, size: int) -> None:
    expected = Statistics(
        elements, size, layout.total_elements, layout.dense_bytes, manifest.chunk_bytes
    )
    if manifest.statistics != expected:
        raise DocumentInvalid(
            f"manifest {manifest.digest} says {manifest.statistics}; its frames and its layout "
            f"say {expected}"
        )
