"""The snapshot detector: a copy of the published bits, in CPU memory. Works with any optimizer.

It covers every published tensor, so frozen ones, buffers and weights changed by hand are compared
like all others. Beyond the copy it holds one frame at a time, and what changed.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from plait.codec.algebra import Comparison, FrameDelta, apply
from plait.cut import Cut, FrameSpec
from plait.errors import FingerprintMismatch, PublishError, UsageError
from plait.fingerprint import ZERO, Fingerprint, fingerprint_run
from plait.layout import Layout, words_per_item
from plait.weights import (
    UNSIGNED,
    ArrayWeights,
    Piece,
    Weights,
    checked_bits,
    fingerprint_weights,
    pieces,
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
        if any(segment.repeats > 1 for frame in cut.frames for segment in frame.segments):
            raise UsageError("a snapshot compares contiguous segments only; expected a plain cut")
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

        def compare(frame: FrameSpec) -> tuple[FrameDelta, Fingerprint]:
            return compare_frame(frame, snapshot, live)

        if self.threads == 1:
            found = list(map(compare, cut.frames))
        else:
            with ThreadPoolExecutor(self.threads, "plait-detect") as pool:
                found = list(pool.map(compare, cut.frames))
        deltas = {number: delta for number, (delta, _) in enumerate(found) if delta.count}
        now = sum((fingerprint for _, fingerprint in found), ZERO)
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


def _runs(piece: Piece, live: LiveTensors) -> Iterator[tuple[int, NDArray[Any]]]:
    """The live bits of a piece, run by run, each with its offset in the piece."""
    for offset in range(0, piece.items, _RUN_ITEMS):
        start = piece.start_item + offset
        stop = min(start + _RUN_ITEMS, piece.start_item + piece.items)
        bits = live[piece.tensor.name].bits(start, stop)
        if bits.shape != (stop - start,) or bits.dtype != UNSIGNED[piece.tensor.item_bytes]:
            raise PublishError(
                f"{piece.tensor.name!r} gave {bits.dtype}{list(bits.shape)} for "
                f"{stop - start} items of {piece.tensor.dtype}"
            )
        bits = np.ascontiguousarray(bits).view()
        bits.flags.writeable = False
        yield offset, bits
