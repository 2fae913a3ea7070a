"""Frames of a publish: found and encoded by a few threads, handed on in order, and counted."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait

from plait.codec.frames import EncodedFrame, encode_delta, encode_dense
from plait.codec.sweep import Sweep
from plait.cut import Cut
from plait.fingerprint import ZERO, Fingerprint
from plait.weights import Weights
from plait.workers import shared
from plait_client.progress import Progress


class FrameEncoder:
    """Encodes the frames of a cut and adds up what they are.

    Args:
        workers: that a round of frames is divided among. One frame, or share of a round, more is
            in work or waits for the upload at a time: memory goes with it.

    Attributes:
        changed_elements, changed_bytes: of the frames handed on.
        increment: sum of theirs.
    """

    def __init__(self, cut: Cut, *, workers: int, progress: Progress) -> None:
        self.changed_elements = 0
        self.changed_bytes = 0
        self.increment: Fingerprint = ZERO
        self._cut = cut
        self._workers = workers
        self._progress = progress

    def dense(self, weights: Weights) -> Iterator[EncodedFrame]:
        """Every frame of the weights, for an anchor."""
        frames = self._cut.frames

        def encode(numbers: range) -> list[EncodedFrame]:
            return [encode_dense(number, frames[number], weights) for number in numbers]

        return self._run([range(n, n + 1) for n in range(len(frames))], encode)

    def deltas(self, old: Weights, new: Weights) -> Iterator[EncodedFrame]:
        """The frames in which the weights differ."""
        frames = self._cut.frames
        sweep = Sweep(frames, old.layout)

        def encode(numbers: range) -> list[EncodedFrame]:
            return [
                encode_delta(number, frames[number], delta)
                for number, delta in zip(numbers, sweep.detect(numbers, old, new), strict=True)
                if delta.count
            ]

        return self._run(list(self._shared_out(sweep.rounds)), encode)

    def _shared_out(self, groups: Iterable[range]) -> Iterator[range]:
        """A round of frames is divided among the workers."""
        for numbers in groups:
            share = -(-len(numbers) // self._workers)
            yield from (numbers[first : first + share] for first in range(0, len(numbers), share))

    def _run(
        self, groups: list[range], encode: Callable[[range], list[EncodedFrame]]
    ) -> Iterator[EncodedFrame]:
        waiting: deque[tuple[range, Future[list[EncodedFrame]]]] = deque()
        pool = shared()
        try:
            for numbers in groups:
                waiting.append((numbers, pool.submit(encode, numbers)))
                if len(waiting) > self._workers:
                    yield from self._next(*waiting.popleft())
            while waiting:
                yield from self._next(*waiting.popleft())
        finally:
            # Whoever stops early may drop the weights: nothing may still be reading them.
            wait([future for _, future in waiting if not future.cancel()])

    def _next(self, numbers: range, future: Future[list[EncodedFrame]]) -> Iterator[EncodedFrame]:
        found = future.result()
        self._progress.advance(sum(self._cut.frames[number].nbytes for number in numbers))
        for encoded in found:
            self.changed_elements += encoded.count
            self.changed_bytes += encoded.count * self._cut.frames[encoded.number].item_bytes
            self.increment += encoded.increment
            yield encoded
