"""A plan's deltas, added up frame by frame before they meet any weights."""

from collections.abc import Iterator, Sequence
from typing import Final

from plait.codec.algebra import FrameDelta
from plait.cut import FrameSpec
from plait.squash import Step, added_up, frames_of
from plait.workers import shared
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
    if cut is None:
        return
    steps = [
        Step(s.manifest, s.cut, s.open, "reverse" if s.step.kind == "reverse" else "forward")
        for s in group
    ]
    for number, total in added_up(cut, steps, frames_of(steps), shared()):
        yield cut.frames[number], total
