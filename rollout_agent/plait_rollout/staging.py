"""Staging: decode the chunks of a move, add its steps up, and prove the base on live bits.

Everything here reads only. It needs the core and numpy, so that an engine's own process can use it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.codec.algebra import FrameDelta, add, negate
from plait.codec.chunks import read_chunk
from plait.codec.frames import decode_deltas
from plait.cut import Cut, FrameSpec
from plait.errors import (
    BaseMismatch,
    CorruptionError,
    DocumentInvalid,
    FingerprintMismatch,
    ObjectMissing,
)
from plait.fingerprint import ZERO
from plait.manifest import ChunkEntry
from plait.workers import shared
from plait_rollout.engine import Move, MoveStep
from plait_rollout.touched import ReadBits, increment_on_base


@dataclass(frozen=True, eq=False, slots=True)
class StagedFrame:
    """All of a move's changes in one frame.

    Attributes:
        number: of the frame in the cut.
        delta: of the whole chain; its increment is a claim until `require_base` has seen live bits.
    """

    number: int
    spec: FrameSpec
    delta: FrameDelta


def add_up(move: Move) -> tuple[StagedFrame, ...]:
    """The chain's deltas added up, frame by frame. Frames that changed back are left out.

    Holds the decoded delta, one chunk and one frame; nothing model-sized.

    Raises:
        DocumentInvalid: steps, cut and layout don't belong together.
        ChunkInvalid, LimitExceeded: a chunk isn't what the format allows.
        CorruptionError: a chunk isn't the one that its manifest names, or sums don't close.
        ObjectMissing: a fetched chunk is gone from the disk.
    """
    check_chain(move)
    added: dict[int, FrameDelta] = {}
    for step in move.steps:
        for entry, path in zip(step.manifest.chunks, step.chunks, strict=True):
            assert move.cut is not None  # check_chain: steps with chunks have one
            _add_chunk(added, step, entry, path, move.cut)
    total = sum((delta.increment for delta in added.values()), ZERO)
    if total != move.target - move.base:
        raise FingerprintMismatch(
            f"the move's frames lead from {move.base} to {move.base + total}, not to {move.target}",
            expected=str(move.target),
            found=str(move.base + total),
        )
    return tuple(
        StagedFrame(number, move.cut.frames[number], added[number])
        for number in sorted(added)
        if move.cut is not None and (added[number].count or added[number].increment != ZERO)
    )


def check_chain(move: Move) -> None:
    """Refuses a move whose steps don't lead from its base to its target over one layout and cut.

    Raises:
        DocumentInvalid, LineageError: naming the step.
    """
    if move.cut is not None:
        move.cut.check_against(move.layout)
    state = move.base
    for number, step in enumerate(move.steps):
        manifest = step.manifest
        if manifest.kind != "delta" or manifest.layout != move.layout.digest:
            raise DocumentInvalid(
                f"step {number} of the move is a {manifest.kind} of layout {manifest.layout}; "
                f"expected a delta of {move.layout.digest}"
            )
        if step.base != state:
            raise BaseMismatch(
                f"step {number} of the move leaves {step.base}, but the one before reaches {state}",
                expected=str(state),
                found=str(step.base),
            )
        if len(step.chunks) != len(manifest.chunks):
            raise DocumentInvalid(
                f"step {number} of the move has {len(step.chunks)} files "
                f"for the {len(manifest.chunks)} chunks of its manifest"
            )
        if manifest.chunks and (move.cut is None or move.cut.digest != manifest.cut):
            raise DocumentInvalid(f"step {number} of the move is of another cut: {manifest.cut}")
        state = step.target
    if state != move.target:
        raise BaseMismatch(f"the move's steps reach {state}, not its target {move.target}")


def require_base(frames: Sequence[StagedFrame], read: ReadBits) -> None:
    """Compares the live bits under every change with the increments; writes nothing.

    Raises:
        BaseMismatch: naming the first frame whose touched words hold something else.
    """
    for frame in frames:
        old = read(frame.spec, frame.delta.positions)
        if increment_on_base(frame.spec, frame.delta, old) != frame.delta.increment:
            raise BaseMismatch(
                f"frame {frame.number}: the live bits under its {frame.delta.count} changes "
                "are not the delta's base",
                remedy="re-read the replica's weights and plan from what they are",
                frame=frame.number,
            )


def _add_chunk(
    added: dict[int, FrameDelta], step: MoveStep, entry: ChunkEntry, path: Path, cut: Cut
) -> None:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ObjectMissing(
            f"chunk {entry.digest} can't be read from {path}: {error}", remedy="fetch it again"
        ) from error
    frames = read_chunk(data, entry=entry).frames
    workers = shared()
    # As many at once as there are workers: nothing is decoded long before it is added up.
    while some := list(itertools.islice(frames, workers.size)):
        if some[-1].number >= len(cut.frames):
            raise CorruptionError(
                f"chunk {entry.digest} holds frame {some[-1].number} "
                f"of a cut of {len(cut.frames)} frames"
            )
        deltas = decode_deltas([(e, cut.frames[e.number]) for e in some], workers)
        for encoded, delta in zip(some, deltas, strict=True):
            if step.direction == "reverse":
                delta = negate(delta)
            before = added.get(encoded.number)
            added[encoded.number] = delta if before is None else add(before, delta)
