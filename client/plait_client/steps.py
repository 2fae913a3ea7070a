"""A plan's deltas, added up frame by frame before they meet any weights."""

from collections.abc import Iterator, Sequence
from typing import Final

from plait.codec.algebra import FrameDelta, add, negate
from plait.codec.chunks import ChunkReader
from plait.codec.frames import decode_delta
from plait.cut import FrameSpec
from plait_client.fetch import FetchedStep

# One open chunk of every step is in memory while frames are added up.
_STEPS_MAX: Final = 16


def groups_of(steps: Sequence[FetchedStep]) -> list[list[FetchedStep]]:
    """Delta steps in order, those in one group of one cut, so that their frames add up.

    Steps that change nothing join their neighbours.
    """
    groups: list[list[FetchedStep]] = []
    cut: str | None = None
    for step in steps:
        own = None if step.cut is None else step.cut.digest
        same = own is None or cut is None or own == cut
        if groups and same and len(groups[-1]) < _STEPS_MAX:
            groups[-1].append(step)
            cut = cut or own
        else:
            groups.append([step])
            cut = own
    return groups


def added_frames(group: Sequence[FetchedStep]) -> Iterator[tuple[FrameSpec, FrameDelta]]:
    """The sum of a group's deltas, frame by frame; frames that end up unchanged are left out.

    Raises:
        ChunkInvalid, CorruptionError: a chunk isn't what its manifest says.
    """
    cut = next((step.cut for step in group if step.cut is not None), None)
    readers = [_Reader(step) for step in group]
    for number in sorted({number for step in group for number in step.entry_of}):
        assert cut is not None  # a manifest with chunks has one
        frame = cut.frames[number]
        total: FrameDelta | None = None
        for reader in readers:
            delta = reader.delta(number, frame)
            if delta is not None:
                total = delta if total is None else add(total, delta)
        if total is not None and total.count:
            yield frame, total


class _Reader:
    """A step's frames, with the chunk that was read last kept open."""

    def __init__(self, step: FetchedStep) -> None:
        self._step = step
        self._open: tuple[str, ChunkReader] | None = None

    def delta(self, number: int, frame: FrameSpec) -> FrameDelta | None:
        """In the direction of the step; None: the step leaves this frame alone."""
        entry = self._step.entry_of.get(number)
        if entry is None:
            return None
        if self._open is None or self._open[0] != entry.digest:
            self._open = (entry.digest, self._step.open(entry))
        delta = decode_delta(self._open[1].frame(number), frame)
        return negate(delta) if self._step.step.kind == "reverse" else delta
