"""Frames of a publish: found and encoded by a few threads, handed on in order, and counted."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from plait.codec.algebra import detect
from plait.codec.frames import EncodedFrame, encode_delta, encode_dense
from plait.cut import Cut, FrameSpec
from plait.fingerprint import ZERO, Fingerprint
from plait.weights import Weights
from plait_client.progress import Progress

_AHEAD_PER_WORKER: Final = 2  # encoded frames that wait for the upload


class FrameEncoder:
    """Encodes the frames of a cut and adds up what they are.

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
        return self._run(lambda number, frame: encode_dense(number, frame, weights))

    def deltas(self, old: Weights, new: Weights) -> Iterator[EncodedFrame]:
        """The frames in which the weights differ."""

        def encode(number: int, frame: FrameSpec) -> EncodedFrame | None:
            delta = detect(frame, old, new)
            return encode_delta(number, frame, delta) if delta.count else None

        return self._run(encode)

    def _run(
        self, encode: Callable[[int, FrameSpec], EncodedFrame | None]
    ) -> Iterator[EncodedFrame]:
        waiting: deque[tuple[FrameSpec, Future[EncodedFrame | None]]] = deque()
        with ThreadPoolExecutor(self._workers, thread_name_prefix="plait-encode") as pool:
            try:
                for number, frame in enumerate(self._cut.frames):
                    waiting.append((frame, pool.submit(encode, number, frame)))
                    if len(waiting) > self._workers * _AHEAD_PER_WORKER:
                        yield from self._next(*waiting.popleft())
                while waiting:
                    yield from self._next(*waiting.popleft())
            finally:
                for _, future in waiting:
                    future.cancel()

    def _next(
        self, frame: FrameSpec, future: Future[EncodedFrame | None]
    ) -> Iterator[EncodedFrame]:
        encoded = future.result()
        self._progress.advance(frame.nbytes)
        if encoded is not None:
            self.changed_elements += encoded.count
            self.changed_bytes += encoded.count * frame.item_bytes
            self.increment += encoded.increment
            yield encoded
