"""A chain of deltas, read from local chunk files and added up frame by frame.

Memory: one frame of the sum for each worker, and the chunks of each step that these lie in.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait import squash
from plait.codec.algebra import FrameDelta
from plait.codec.chunks import ChunkReader, read_chunk
from plait.cut import Cut, FrameSpec
from plait.errors import ChunkInvalid, FormatError, ObjectMissing
from plait.manifest import ChunkEntry, Manifest
from plait.workers import shared
from plait_rollout.engine import Direction


@dataclass(frozen=True, slots=True)
class Step:
    """One delta of a chain. `locate` gives the local file of a chunk."""

    manifest: Manifest
    direction: Direction
    locate: Callable[[ChunkEntry], Path]


def check_chain(layout_digest: str, cut: Cut | None, steps: Sequence[Step]) -> None:
    """Refuses steps that can't be added up.

    Raises:
        FormatError: an anchor, another layout or cut, or a frame number outside the cut.
        BaseMismatch: steps that don't lead from one to the next.
    """
    for step in steps:
        manifest = step.manifest
        if manifest.kind != "delta" or manifest.layout != layout_digest:
            raise FormatError(f"{manifest.digest} is no delta of layout {layout_digest}")
        if not manifest.chunks:
            continue
        if cut is None or manifest.cut != cut.digest:
            named = cut.digest if cut else None
            raise FormatError(f"{manifest.digest} has cut {manifest.cut}, the move has {named}")
        for chunk in manifest.chunks:
            if chunk.frames[-1] >= len(cut.frames):
                raise ChunkInvalid(
                    f"chunk {chunk.digest} holds frame {chunk.frames[-1]} "
                    f"of a cut of {len(cut.frames)} frames"
                )
    if steps:
        squash.check_chain([_stored(step, cut) for step in steps])


def added_up(
    cut: Cut, steps: Sequence[Step], wanted: Callable[[FrameSpec], bool]
) -> Iterator[tuple[FrameSpec, FrameDelta]]:
    """The wanted frames' sums over all steps, each once; unchanged frames are left out.

    Chunks without a wanted frame aren't read.

    Raises:
        ChunkInvalid, CorruptionError: a chunk isn't what its manifest says.
        ObjectMissing: a chunk's file isn't there.
    """
    stored = [_stored(step, cut) for step in steps]
    numbers = [number for number in squash.frames_of(stored) if wanted(cut.frames[number])]
    for number, total in squash.added_up(cut, stored, numbers, shared()):
        yield cut.frames[number], total


def _stored(step: Step, cut: Cut | None) -> squash.Step:
    return squash.Step(step.manifest, cut, _reader_of(step), step.direction)


def _reader_of(step: Step) -> Callable[[ChunkEntry], ChunkReader]:
    """Opens the step's chunks, verified."""

    def read(chunk: ChunkEntry) -> ChunkReader:
        try:
            data = step.locate(chunk).read_bytes()
        except OSError as error:
            raise ObjectMissing(f"chunk {chunk.digest} can't be read: {error}") from error
        return read_chunk(data, entry=chunk)

    return read
