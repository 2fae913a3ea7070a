"""A chain of deltas, read from local chunk files and added up frame by frame.

Memory: one frame of the sum at a time, and the chunk last read of each step.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plait.codec.algebra import FrameDelta, add, negate
from plait.codec.chunks import ChunkReader, read_chunk
from plait.codec.frames import decode_delta
from plait.cut import Cut, FrameSpec
from plait.errors import ChunkInvalid, FormatError, ObjectMissing
from plait.manifest import ChunkEntry, Manifest
from plait_rollout.engine import Direction

# Deltas only: an anchor's frames have no base to be compared with.
_DELTA_MODES: Final = ("delta", "wide")


@dataclass(frozen=True, slots=True)
class Step:
    """One delta of a chain. `locate` gives the local file of a chunk."""

    manifest: Manifest
    direction: Direction
    locate: Callable[[ChunkEntry], Path]


def check_chain(layout_digest: str, cut: Cut | None, steps: Sequence[Step]) -> None:
    """Refuses steps that can't be added up.

    Raises:
        FormatError: an anchor, another layout or cut, a frame number outside the cut, or
            steps that don't lead from one to the next.
    """
    for before, after in itertools.pairwise(steps):
        if _ends(before)[1] != _ends(after)[0]:
            raise FormatError(
                f"a step reaches {_ends(before)[1]} and the next one leaves {_ends(after)[0]}"
            )
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


def added_up(
    cut: Cut, steps: Sequence[Step], wanted: Callable[[FrameSpec], bool]
) -> Iterator[tuple[FrameSpec, FrameDelta]]:
    """The wanted frames' sums over all steps, each once; unchanged frames are left out.

    Chunks without a wanted frame aren't read.

    Raises:
        ChunkInvalid, CorruptionError: a chunk isn't what its manifest says.
        ObjectMissing: a chunk's file isn't there.
    """
    places: dict[int, list[tuple[int, ChunkEntry]]] = {}
    for number, step in enumerate(steps):
        for chunk in step.manifest.chunks:
            for frame in chunk.frames:
                places.setdefault(frame, []).append((number, chunk))
    open_chunks: dict[int, tuple[str, ChunkReader]] = {}
    for frame, held in places.items():
        spec = cut.frames[frame]
        if not wanted(spec):
            continue
        total: FrameDelta | None = None
        for number, chunk in held:
            reader = _reader(open_chunks, number, steps[number], chunk)
            delta = _delta(reader, frame, spec)
            if steps[number].direction == "reverse":
                delta = negate(delta)
            total = delta if total is None else add(total, delta)
        if total is not None and total.count:
            yield spec, total


def _ends(step: Step) -> tuple[object, object]:
    ends = (step.manifest.base, step.manifest.target)
    return ends if step.direction == "forward" else ends[::-1]


def _reader(
    open_chunks: dict[int, tuple[str, ChunkReader]], number: int, step: Step, chunk: ChunkEntry
) -> ChunkReader:
    """The step's chunk, verified when it is opened; one is kept open for each step."""
    if number in open_chunks and open_chunks[number][0] == chunk.digest:
        return open_chunks[number][1]
    open_chunks.pop(number, None)
    try:
        data = step.locate(chunk).read_bytes()
    except OSError as error:
        raise ObjectMissing(f"chunk {chunk.digest} can't be read: {error}") from error
    reader = read_chunk(data, entry=chunk)
    open_chunks[number] = (chunk.digest, reader)
    return reader


def _delta(reader: ChunkReader, number: int, spec: FrameSpec) -> FrameDelta:
    encoded = reader.frame(number)
    if encoded.mode not in _DELTA_MODES:
        raise ChunkInvalid(f"frame {number} has mode {encoded.mode!r}; a delta has {_DELTA_MODES}")
    return decode_delta(encoded, spec)
