"""Detection of many frames at once: each stretch of a tensor is read once, for all of them.

Where frames are blocks of columns, a pass for each would go through the same rows again and again.
Here the rows are compared as they lie in memory, and what changed is dealt out to the frames.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from plait.codec import scan
from plait.codec.algebra import FrameDelta, detect
from plait.codec.stretches import Part, Scratch, Stretch, stretches
from plait.cut import FrameSpec
from plait.errors import LayoutChanged
from plait.fingerprint import ZERO, Fingerprint
from plait.layout import Layout, TensorSpec
from plait.weights import UNSIGNED, Weights, pieces, readable_bits

# Items read at once.
_BLOCK: Final = 1 << 21

# Items [start, stop) of a tensor, before and now: two 1-d arrays of its unsigned type.
Read = Callable[[TensorSpec, int, int], tuple[NDArray[Any], NDArray[Any]]]


class Sweep:
    """Detects what changed in the frames of a cut.

    What follows from the cut alone is laid out once, when a frame is first asked for: a publisher
    keeps a sweep for all versions that it publishes along a cut. Any number of threads may use it.

    Attributes:
        rounds: numbers of adjacent frames that are worth a pass together; others are alone.

    Args:
        frames: of a cut that was checked against the layout.
    """

    def __init__(self, frames: Sequence[FrameSpec], layout: Layout) -> None:
        self._frames = tuple(frames)
        self._layout = layout
        self._passes: dict[range, _Pass] = {}
        self.rounds = tuple(rounds(self._frames))

    def detect(self, numbers: range, old: Weights, new: Weights) -> Iterator[FrameDelta]:
        """What `detect` finds in each of these frames, adjacent ones, in one pass over all.

        Raises:
            LayoutChanged: weights of another layout.
        """
        self._layout.require_equal(old.layout, what="the old weights")
        self._layout.require_equal(new.layout, what="the new weights")
        if len(numbers) == 1:
            return iter((detect(self._frames[numbers[0]], old, new),))
        if numbers not in self._passes:
            here = [self._frames[number] for number in numbers]
            self._passes[numbers] = _Pass(here, self._layout)
        return self._passes[numbers].run(old, new)


def detect_frames(frames: Sequence[FrameSpec], old: Weights, new: Weights) -> list[FrameDelta]:
    """What `detect` finds in each of these frames.

    Raises:
        LayoutChanged: the two have different layouts.
    """
    old.layout.require_equal(new.layout, what="the new weights")
    return list(_Pass(frames, old.layout).run(old, new))


class _Pass:
    """The stretches of some frames, and which of what is found in them each frame is made of."""

    def __init__(self, frames: Sequence[FrameSpec], layout: Layout) -> None:
        self._frames = frames
        groups = [stretches(parts, _BLOCK) for parts in parts_by_tensor(frames, layout)]
        self._tensors = [(group[0].tensor, group) for group in groups]
        flat = [stretch for group in groups for stretch in group]
        empty = np.empty(0, np.int64)
        of_frame = np.concatenate([empty, *(stretch.frames for stretch in flat)])
        offsets = np.concatenate([empty, *(stretch.offsets for stretch in flat)])
        # Parts by frame, a frame's in the order of its items. lexsort is stable.
        order = np.lexsort((offsets, of_frame))
        borders = np.searchsorted(of_frame[order], np.arange(len(frames) + 1)).tolist()
        self._parts = [order[first:end] for first, end in itertools.pairwise(borders)]

    def run(self, old: Weights, new: Weights) -> Iterator[FrameDelta]:
        """Compares all, then hands out one frame after the other."""
        scratch = Scratch()
        # A stretch's changes lie behind those of the one before.
        count = sum(part.size for part in self._parts)
        ends, lanes = np.zeros(count + 1, np.int64), np.empty((count, 2), np.uint64)
        done = 0
        for tensor, group in self._tensors:
            before, after = readable_bits(old, tensor), readable_bits(new, tensor)
            for stretch in group:
                first, stop, end = stretch.start, stretch.stop, done + stretch.parts
                scratch.make_room(tensor.item_bytes, int(ends[done]), stretch.room)
                here = before[first:stop], after[first:stop]
                stretch.scan(*here, scratch, ends[done : end + 1], lanes[done:end])
                done = end
        for frame, mine in zip(self._frames, self._parts, strict=True):
            yield _gathered(frame, scratch, ends[mine], ends[mine + 1], lanes[mine])


def _gathered(
    frame: FrameSpec, scratch: Scratch,
    firsts: NDArray[np.int64], ends: NDArray[np.int64], lanes: NDArray[np.uint64],
) -> FrameDelta:  # fmt: skip
    """The delta of a frame whose parts' changes lie at [firsts[k], ends[k]) of the scratch."""
    count = int((ends - firsts).sum())
    positions = np.empty(count, np.uint32)
    differences = np.empty(count, UNSIGNED[frame.item_bytes])
    if count:
        found = scratch.differences(frame.item_bytes)
        scan.gather_changes(scratch.positions, found, firsts, ends, positions, differences)
    increment = Fingerprint(*map(int, lanes.sum(axis=0)))
    return FrameDelta(frame.item_bytes, positions, differences, increment)


def rounds(frames: Sequence[FrameSpec]) -> Iterator[range]:
    """Numbers of adjacent frames whose blocks of columns lie in the same rows; others are alone.

    Those of a round are worth a sweep; `plait.grain` numbers its frames in such rounds.
    """
    first = 0
    spans = [_span(frame) for frame in frames]
    for number in range(1, len(frames) + 1):
        if number == len(frames) or not _overlap(spans[first], spans[number]):
            yield range(first, number)
            first = number


def _span(frame: FrameSpec) -> tuple[int, int]:
    """Words from a frame's first block of columns to the end of the last one."""
    blocks = [segment for segment in frame.segments if segment.repeats > 1]
    begin = min((segment.first_word for segment in blocks), default=0)
    return begin, max((s.first_word + s.repeats * s.stride for s in blocks), default=0)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


@dataclass(frozen=True, slots=True)
class Found:
    """What changed in a part of a frame: at least one item."""

    frame: int
    positions: NDArray[np.uint32]
    differences: NDArray[Any]
    increment: Fingerprint


def parts_by_tensor(frames: Sequence[FrameSpec], layout: Layout) -> list[list[Part]]:
    """The frames' pieces, one list for each tensor that they reach."""
    found: dict[str, list[Part]] = {}
    for number, frame in enumerate(frames):
        for piece in pieces(frame, layout):
            found.setdefault(piece.tensor.name, []).append(Part(number, piece))
    return [found[name] for name in sorted(found)]


def compare(
    parts: Sequence[Part], read: Read, scratch: Scratch | None = None, *, block: int | None = None
) -> Iterator[Found]:
    """What changed in the parts of one tensor.

    Args:
        read: called for adjacent blocks, each once, which cover the parts.
        scratch: used by one thread at a time; its own if None.
        block: items that `read` is asked for at once, for a `read` that makes them; at most 2^21.
    Raises:
        LayoutChanged: it gave other arrays than it should.
    """
    scratch = scratch or Scratch()
    for stretch in stretches(parts, _BLOCK if block is None else min(block, _BLOCK)):
        items = stretch.stop - stretch.start
        old, new = (
            _checked(bits, stretch.tensor, items)
            for bits in read(stretch.tensor, stretch.start, stretch.stop)
        )
        scratch.make_room(stretch.tensor.item_bytes, 0, stretch.room)
        yield from _found(stretch, old, new, scratch)


def _found(
    stretch: Stretch, old: NDArray[Any], new: NDArray[Any], scratch: Scratch
) -> Iterator[Found]:
    """The parts' changes, copied from the scratch, where there are any."""
    ends = np.zeros(stretch.parts + 1, np.int64)
    lanes = np.empty((stretch.parts, 2), np.uint64)
    stretch.scan(old, new, scratch, ends, lanes)
    differences = scratch.differences(stretch.tensor.item_bytes)
    for number, frame in enumerate(stretch.frames.tolist()):
        first, end = int(ends[number]), int(ends[number + 1])
        if first < end:
            increment = Fingerprint(*map(int, lanes[number]))
            mine = slice(first, end)
            yield Found(frame, scratch.positions[mine].copy(), differences[mine].copy(), increment)


def join(frames: Sequence[FrameSpec], found: Iterable[Found]) -> list[FrameDelta]:
    """One delta for each frame."""
    rows: list[list[Found]] = [[] for _ in frames]
    for part in found:
        rows[part.frame].append(part)
    return [_joined(frame, parts) for frame, parts in zip(frames, rows, strict=True)]


def _joined(frame: FrameSpec, parts: list[Found]) -> FrameDelta:
    parts.sort(key=lambda part: int(part.positions[0]))
    empty = np.empty(0, UNSIGNED[frame.item_bytes])
    return FrameDelta(
        frame.item_bytes,
        np.concatenate([np.empty(0, np.uint32), *(part.positions for part in parts)]),
        np.concatenate([empty, *(part.differences for part in parts)]),
        sum((part.increment for part in parts), ZERO),
    )


def _checked(bits: NDArray[Any], tensor: TensorSpec, items: int) -> NDArray[Any]:
    """As the kernel, which checks nothing, relies on it."""
    if bits.dtype != UNSIGNED[tensor.item_bytes] or bits.shape != (items,):
        raise LayoutChanged(
            f"{tensor.name!r} gave {bits.dtype}{list(bits.shape)} for {items} items "
            f"of {tensor.dtype}"
        )
    bits = np.ascontiguousarray(bits).view()
    bits.flags.writeable = False
    return bits
