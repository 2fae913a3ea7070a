"""The items that a delta touches: in which tensors they lie, and what their bits add up to."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.codec.algebra import FrameDelta
from plait.cut import FrameSpec
from plait.fingerprint import Fingerprint, fingerprint_at
from plait.layout import Layout, TensorSpec
from plait.weights import pieces

Positions = NDArray[np.uint32]
Items = NDArray[np.int64]
Bits = NDArray[Any]

# Reads live bits: (frame, positions uint32 [count]) → unsigned [count] of the frame's item size.
ReadBits = Callable[[FrameSpec, Positions], Bits]


def by_tensor(
    frame: FrameSpec, layout: Layout, positions: Positions
) -> Iterator[tuple[TensorSpec, slice, Items]]:
    """Splits positions by tensor.

    Args:
        positions: uint32 [count], frame-local, strictly increasing, below `frame.items`.
    Yields:
        the tensor, its rows of `positions`, and the item numbers in it, int64 [rows].
    """
    parts = pieces(frame, layout)
    bounds = np.array([*(piece.frame_offset for piece in parts), frame.items], np.int64)
    rows = np.searchsorted(positions, bounds)
    for piece, first, end in zip(parts, rows, rows[1:], strict=False):
        if first < end:
            chosen = slice(int(first), int(end))
            offsets = positions[chosen].astype(np.int64) - piece.frame_offset
            run, item = np.divmod(offsets, piece.run)
            yield piece.tensor, chosen, piece.start_item + run * piece.stride + item


def increment_between(frame: FrameSpec, positions: Positions, old: Bits, new: Bits) -> Fingerprint:
    """Fingerprint of these items holding `new`, minus that of their holding `old`."""
    words = frame.words_of(positions)
    return fingerprint_at(words, new) - fingerprint_at(words, old)


def increment_on_base(frame: FrameSpec, delta: FrameDelta, old: Bits) -> Fingerprint:
    """What the delta's increment is if its items hold `old`."""
    return increment_between(frame, delta.positions, old, old + delta.differences)
