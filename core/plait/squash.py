"""Stored deltas added up without weights: a chain of them, frame by frame.

Memory: one frame of the sum, and of every step the chunk last read; with workers, a frame of the
sum for each of them, and the chunks that these lie in. Frames add up only within one cut; of steps
over different cuts nothing but the total increment survives.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from plait.codec.algebra import FrameDelta, add, negate
from plait.codec.chunks import Chunk, ChunkReader, pack_chunks
from plait.codec.frames import EncodedFrame, decode_delta, encode_delta
from plait.cut import Cut, FrameSpec
from plait.errors import (
    BaseMismatch,
    ChunkInvalid,
    DocumentInvalid,
    LayoutChanged,
    UsageError,
)
from plait.fingerprint import ZERO, Fingerprint
from plait.manifest import ChunkEntry, Manifest, Statistics
from plait.workers import Workers

Direction = Literal["forward", "reverse"]
Summands = list[tuple[EncodedFrame, Direction]]

# Deltas only: an anchor's frames have no base to be added to.
_DELTA_MODES: Final = ("delta", "wide")


@dataclass(frozen=True, slots=True)
class Step:
    """One stored delta of a chain.

    Attributes:
        cut: that its frames are numbered in, checked against the layout; None without chunks.
        read: opens a chunk of the manifest, verified against its entry.
        direction: `reverse` leads from the manifest's target to its base.
    """

    manifest: Manifest
    cut: Cut | None
    read: Callable[[ChunkEntry], ChunkReader]
    direction: Direction = "forward"

    @property
    def ends(self) -> tuple[Fingerprint | None, Fingerprint | None]:
        """The states that it leads from and to."""
        ends = (self.manifest.base, self.manifest.target)
        return ends if self.direction == "forward" else ends[::-1]


def frames_of(steps: Iterable[Step]) -> dict[int, int]:
    """Every frame that the steps touch, with its slot, by slot and number: as chunks hold them.

    Args:
        steps: of one cut.
    Raises:
        DocumentInvalid: two steps have one frame in different slots.
    """
    slots: dict[int, int] = {}
    for step in steps:
        for chunk in step.manifest.chunks:
            for number in chunk.frames:
                if slots.setdefault(number, chunk.slot) != chunk.slot:
                    raise DocumentInvalid(
                        f"frame {number} is in slot {slots[number]} and, in manifest "
                        f"{step.manifest.digest}, in slot {chunk.slot}; a frame of a cut has one"
                    )
    return {number: slots[number] for number in sorted(slots, key=lambda n: (slots[n], n))}


def added_up(
    cut: Cut, steps: Sequence[Step], numbers: Iterable[int], workers: Workers | None = None
) -> Iterator[tuple[int, FrameDelta]]:
    """(frame number, sum over all steps) of these frames, in their order; unchanged ones left out.

    Chunks that hold none of them aren't read; in the order of `frames_of`, each is read once.

    Args:
        workers: that add up a frame each; as many frames and the chunks they lie in are held.
    Raises:
        ChunkInvalid, CorruptionError: a chunk isn't what its manifest says.
        Whatever the steps' `read` raises.
    """
    summands = _summands(cut, steps, numbers)

    def total(job: tuple[int, Summands]) -> tuple[int, FrameDelta | None]:
        return job[0], _total(cut.frames[job[0]], job[1], workers)

    while some := list(itertools.islice(summands, workers.size if workers else 1)):
        # Fewer frames than workers are decoded by all of them, one after the other.
        each = workers is not None and len(some) == workers.size
        totals = workers.map(total, some) if workers and each else map(total, some)
        for frame, delta in totals:
            if delta is not None and delta.count:
                yield frame, delta


def _summands(
    cut: Cut, steps: Sequence[Step], numbers: Iterable[int]
) -> Iterator[tuple[int, Summands]]:
    """What is to be added up for each of the frames, read chunk by chunk."""
    places = [{n: chunk for chunk in s.manifest.chunks for n in chunk.frames} for s in steps]
    begun: dict[int, tuple[str, ChunkReader]] = {}
    for frame in numbers:
        if frame >= len(cut.frames):
            raise ChunkInvalid(f"frame {frame} of a cut of {len(cut.frames)} frames")
        found: list[tuple[EncodedFrame, Direction]] = []
        for place, (step, held) in enumerate(zip(steps, places, strict=True)):
            if frame not in held:
                continue
            chunk = held[frame]
            if place not in begun or begun[place][0] != chunk.digest:
                begun.pop(place, None)  # one chunk of a step at a time
                begun[place] = (chunk.digest, step.read(chunk))
            found.append((_encoded(begun[place][1], frame), step.direction))
        yield frame, found


def increment_of(steps: Sequence[Step]) -> Fingerprint:
    """The increment of a whole chain, whatever its cuts; from the manifests alone."""
    return sum((_increment(step) for step in steps), ZERO)


def check_chain(steps: Sequence[Step]) -> None:
    """Proves that deltas lead from one to the next.

    Raises:
        UsageError: no steps, or an anchor among them.
        LayoutChanged: steps of different layouts.
        BaseMismatch: one doesn't leave from where the one before it arrives.
    """
    if not steps:
        raise UsageError("no deltas to add up; expected one at least")
    for step in steps:
        if step.manifest.kind != "delta":
            raise UsageError(f"{step.manifest.digest} is an anchor; only deltas add up")
    for before, after in itertools.pairwise(steps):
        if before.manifest.layout != after.manifest.layout:
            raise LayoutChanged(
                f"a delta of layout {after.manifest.layout} behind one of {before.manifest.layout}"
            )
        if before.ends[1] != after.ends[0]:
            raise BaseMismatch(
                f"a step reaches {before.ends[1]} and the next one leaves {after.ends[0]}"
            )


class Squash:
    """A chain of stored deltas as one delta: `chunks` first, then `manifest`.

    Raises:
        UsageError, LayoutChanged, BaseMismatch: as `check_chain`; UsageError also where the steps'
            frames belong to different cuts.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        check_chain(steps)
        cuts = {step.manifest.cut: step.cut for step in steps if step.manifest.chunks}
        if len(cuts) > 1 or None in cuts.values():
            raise UsageError(
                f"deltas over different cuts ({', '.join(sorted(map(str, cuts)))}) don't add up",
                remedy="squash each stretch of one cut by itself, or publish the whole difference",
            )
        self._steps = tuple(steps)
        self._cut = next(iter(cuts.values()), None)
        self._entries: list[ChunkEntry] | None = None
        self._elements = self._bytes = 0

    def chunks(self) -> Iterator[Chunk]:
        """The sum's chunks, slot by slot as the steps have them. Holds one frame and one chunk of
        the sum, and one chunk of every step."""
        self._elements = self._bytes = 0
        entries: list[ChunkEntry] = []
        slots = frames_of(self._steps)
        for slot, numbers in itertools.groupby(slots, key=slots.__getitem__):
            for chunk in pack_chunks(self._encoded(numbers), slot):
                entries.append(chunk.entry)
                yield chunk
        self._entries = entries

    def manifest(self) -> Manifest:
        """The one delta, once all `chunks` were taken.

        Raises:
            UsageError: they weren't.
            FingerprintMismatch: their increments don't lead from the first state to the last.
        """
        if self._entries is None:
            raise UsageError("the manifest of a squash names its chunks: take all of them first")
        base, target = self._steps[0].ends[0], self._steps[-1].ends[1]
        assert target is not None  # a delta has both ends
        like = self._steps[0].manifest.statistics
        return Manifest(
            kind="delta",
            layout=self._steps[0].manifest.layout,
            cut=self._cut.digest if self._cut is not None and self._entries else None,
            base=base,
            target=target,
            chunks=tuple(self._entries),
            statistics=Statistics(
                self._elements, self._bytes, like.total_elements, like.dense_bytes,
                sum(entry.size for entry in self._entries),
            ),
        )  # fmt: skip

    def _encoded(self, numbers: Iterable[int]) -> Iterator[EncodedFrame]:
        assert self._cut is not None  # there are frames
        for number, delta in added_up(self._cut, self._steps, numbers):
            self._elements += delta.count
            self._bytes += delta.count * delta.item_bytes
            yield encode_delta(number, self._cut.frames[number], delta)


def _increment(step: Step) -> Fingerprint:
    increment = step.manifest.increment
    return increment if step.direction == "forward" else -increment


def _total(frame: FrameSpec, summands: Summands, workers: Workers | None) -> FrameDelta | None:
    total: FrameDelta | None = None
    for encoded, direction in summands:
        delta = decode_delta(encoded, frame, workers=workers)
        delta = negate(delta) if direction == "reverse" else delta
        total = delta if total is None else add(total, delta)
    return total


def _encoded(reader: ChunkReader, number: int) -> EncodedFrame:
    encoded = reader.frame(number)
    if encoded.mode not in _DELTA_MODES:
        raise ChunkInvalid(f"frame {number} has mode {encoded.mode!r}; a delta has {_DELTA_MODES}")
    return encoded
