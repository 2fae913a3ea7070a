"""The snapshot detector: a copy of the published bits, in CPU memory. Works with any optimizer.

It covers every published tensor, so frozen ones, buffers and weights changed by hand are compared
like all others. Beyond the copy it holds one frame at a time, and what changed.
"""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from plait.codec import sweep
from plait.codec.algebra import Comparison, FrameDelta, apply
from plait.cut import Cut, FrameSpec
from plait.errors import FingerprintMismatch, PublishError
from plait.fingerprint import ZERO, Fingerprint, fingerprint_run
from plait.layout import Layout, TensorSpec, words_per_item
from plait.weights import (
    UNSIGNED,
    ArrayWeights,
    Piece,
    Weights,
    checked_bits,
    fingerprint_weights,
    pieces,
    readable_bits,
)
from plait_trainer.detector import Capture, LiveTensors

# Items read, compared and hashed at once: they stay in the cache between the three.
_RUN_ITEMS: Final = 1 << 20


@dataclass(eq=False)
class SnapshotDetector:
    """Compares the live bits with a retained copy of the last captured ones.

    Attributes:
        threads: that compare and hash frames at the same time, each holding one frame. More than
            one is for weights in CPU memory: they read outside the caller's device stream.
    """

    threads: int = 1
    _snapshot: ArrayWeights | None = None
    _cut: Cut | None = None
    _fingerprint: Fingerprint = ZERO

    def attach(
        self,
        live: LiveTensors,
        layout: Layout,
        cut: Cut,
        *,
        base: Weights | None = None,
        optimizer: torch.optim.Optimizer | None = None,  # noqa: ARG002 (others use its state)
    ) -> Fingerprint:
        if base is not None:
            layout.require_equal(base.layout, what="the base")
        arrays: dict[str, NDArray[Any]] = {}
        for tensor in layout.tensors:
            bits = np.empty(tensor.items, UNSIGNED[tensor.item_bytes])
            for start in range(0, tensor.items, _RUN_ITEMS):
                stop = min(start + _RUN_ITEMS, tensor.items)
                bits[start:stop] = (
                    live[tensor.name].bits(start, stop)
                    if base is None
                    else base.bits(tensor.name)[start:stop]
                )
            arrays[tensor.name] = bits
        snapshot = ArrayWeights(layout, arrays)
        self._fingerprint = fingerprint_weights(snapshot)
        self._snapshot, self._cut = snapshot, cut
        return self._fingerprint

    @property
    def captured(self) -> Weights:
        return self._held()[0]

    def capture(self, live: LiveTensors) -> Capture:
        snapshot, cut = self._held()

        found, now = self._compare(snapshot, cut, live)
        deltas = {number: delta for number, delta in enumerate(found) if delta.count}
        reached = sum((delta.increment for delta in deltas.values()), self._fingerprint)
        if reached != now:
            raise FingerprintMismatch(
                f"the weights have the fingerprint {now}, the kept copy and the changes found "
                f"lead to {reached}: something wrote to the copy, or to the weights meanwhile",
                remedy="attach again",
                expected=str(now),
                found=str(reached),
            )
        return Capture(deltas, now, "full")

    def _compare(
        self, snapshot: ArrayWeights, cut: Cut, live: LiveTensors
    ) -> tuple[list[FrameDelta], Fingerprint]:
        """Every frame's delta, and the fingerprint of all live bits."""
        if any(segment.repeats > 1 for frame in cut.frames for segment in frame.segments):
            return compare_tensors(cut.frames, snapshot, live, threads=self.threads)

        def compare(frame: FrameSpec) -> tuple[FrameDelta, Fingerprint]:
            return compare_frame(frame, snapshot, live)

        if self.threads == 1:
            found = list(map(compare, cut.frames))
        else:
            with ThreadPoolExecutor(self.threads, "plait-detect") as pool:
                found = list(pool.map(compare, cut.frames))
        return [delta for delta, _ in found], sum((now for _, now in found), ZERO)

    def keep(self, capture: Capture) -> None:
        snapshot, cut = self._held()
        for number, delta in capture.deltas.items():
            apply(cut.frames[number], snapshot, delta)
        self._fingerprint = capture.fingerprint

    def _held(self) -> tuple[ArrayWeights, Cut]:
        if self._snapshot is None or self._cut is None:
            raise PublishError("the detector isn't attached", remedy="call attach() first")
        return self._snapshot, self._cut


def compare_frame(
    frame: FrameSpec, old: Weights, live: LiveTensors
) -> tuple[FrameDelta, Fingerprint]:
    """A frame's delta from `old` to the live weights, and the fingerprint of all its live bits.

    Args:
        frame: of a cut that was checked against the layout, with segments of one run each.
    """
    comparison, now = Comparison(frame), ZERO
    width = words_per_item(frame.item_bytes)
    for piece in pieces(frame, old.layout):
        before = piece.view(checked_bits(old, piece.tensor))
        for offset, new in _runs(piece, live):
            word = piece.first_word + offset * width
            comparison.add_run(
                before[offset : offset + new.size], new,
                first_word=word, offset=piece.frame_offset + offset,
            )  # fmt: skip
            now += fingerprint_run(new, word)
    return comparison.delta(), now


def compare_tensors(
    frames: Sequence[FrameSpec], old: Weights, live: LiveTensors, *, threads: int = 1
) -> tuple[list[FrameDelta], Fingerprint]:
    """As `compare_frame` for all frames of a covering cut, blocks of columns among them.

    Live weights are read once, tensor by tensor, whatever frames they are dealt out to.
    """

    def compare(parts: Sequence[sweep.Part]) -> tuple[list[sweep.Found], Fingerprint]:
        piece, now = parts[0].piece, ZERO
        width = words_per_item(piece.tensor.item_bytes)
        first_word = piece.first_word - piece.start_item * width

        def read(tensor: TensorSpec, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
            nonlocal now
            bits = _live_bits(tensor, live, start, stop)
            now += fingerprint_run(bits, first_word + start * width)
            return readable_bits(old, tensor)[start:stop], bits

        return list(sweep.compare(parts, read)), now

    groups = sweep.parts_by_tensor(frames, old.layout)
    if threads == 1:
        found = list(map(compare, groups))
    else:
        with ThreadPoolExecutor(threads, "plait-detect") as pool:
            found = list(pool.map(compare, groups))
    deltas = sweep.join(frames, itertools.chain.from_iterable(rows for rows, _ in found))
    return deltas, sum((now for _, now in found), ZERO)


def _runs(piece: Piece, live: LiveTensors) -> Iterator[tuple[int, NDArray[Any]]]:
    """The live bits of a piece, run by run, each with its offset in the piece."""
    for offset in range(0, piece.items, _RUN_ITEMS):
        start = piece.start_item + offset
        stop = min(start + _RUN_ITEMS, piece.start_item + piece.items)
        yield offset, _live_bits(piece.tensor, live, start, stop)


def _live_bits(tensor: TensorSpec, live: LiveTensors, start: int, stop: int) -> NDArray[Any]:
    bits = live[tensor.name].bits(start, stop)
    if bits.shape != (stop - start,) or bits.dtype != UNSIGNED[tensor.item_bytes]:
        raise PublishError(
            f"{tensor.name!r} gave {bits.dtype}{list(bits.shape)} for "
            f"{stop - start} items of {tensor.dtype}"
        )
    bits = np.ascontiguousarray(bits).view()
    bits.flags.writeable = False
    return bits
