"""The boundary log: published bits of the weights that recovery might round to other bits.

A weight is recovered within an error bound E. Rounding is monotone: if `w - E` and `w + E` are
published as the same bits, so is everything between them, and what is recovered next has these
bits, too. Weights for which that doesn't hold are written down: position and published bits.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from plait.tensors import bits_of, integer_view
from plait.weights import UNSIGNED
from plait_trainer import cpu_loops
from plait_trainer.inversion import SLOPE, is_compiled

# Positions are kept within blocks of so many items, in two bytes each.
_BLOCK: Final = 1 << 16


@dataclass(frozen=True, eq=False)
class BoundaryLog:
    """The log of one tensor, positions increasing.

    Attributes:
        lows: uint16 [entries], positions modulo 2^16.
        bits: unsigned [entries] of the published item size.
        ends: int64 [blocks], entries of each block of 2^16 items and all before it.
    """

    lows: NDArray[np.uint16]
    bits: NDArray[Any]
    ends: NDArray[np.int64]

    @property
    def entries(self) -> int:
        return self.bits.size

    @property
    def nbytes(self) -> int:
        """Bytes that the log takes."""
        return self.lows.nbytes + self.bits.nbytes + self.ends.nbytes

    def correct(self, start: int, bits: NDArray[Any]) -> None:
        """Put what was written down in place of the bits of the items from `start` on."""
        stop = start + bits.size
        first, last = start // _BLOCK, -(-stop // _BLOCK)
        begin = int(self.ends[first - 1]) if first else 0
        rows = slice(begin, int(self.ends[last - 1]) if last else 0)
        counts = np.diff(self.ends[first:last], prepend=begin)
        positions = np.repeat(np.arange(first, last, dtype=np.int64) * _BLOCK, counts)
        positions += self.lows[rows]
        inside = (positions >= start) & (positions < stop)
        bits[positions[inside] - start] = self.bits[rows][inside]


class LogWriter:
    """Makes the log of a tensor in one pass, runs in the order of their items.

    Args:
        items: of the tensor.
        offset: the error bound is `SLOPE · |w| + offset`.
    """

    def __init__(self, items: int, offset: float) -> None:
        self.offset = offset
        self._counts = np.zeros(-(-items // _BLOCK), np.int64)
        # Bytes, not arrays: thousands of these, a few entries each, would take more than they hold.
        self._lows, self._bits, self._size = bytearray(), bytearray(), 1

    def add(
        self, start: int, weights: torch.Tensor, published: torch.Tensor, room: torch.Tensor
    ) -> None:
        """Look at the items from `start` on.

        Args:
            weights: float32 [items], contiguous.
            published: the same, rounded to the published dtype.
            room: float32 [2, items], overwritten.
        """
        near = near_boundary(weights, self.offset, published.dtype, room)
        if near.numel():
            positions, bits = near.cpu().numpy() + start, bits_of(published[near].cpu())
            self._lows += (positions % _BLOCK).astype(np.uint16).tobytes()
            self._bits += bits.tobytes()
            self._size = bits.itemsize
            np.add.at(self._counts, positions // _BLOCK, 1)

    def log(self) -> BoundaryLog:
        """What was found, packed."""
        bits = np.frombuffer(self._bits, UNSIGNED[self._size]).copy()
        return BoundaryLog(np.frombuffer(self._lows, np.uint16).copy(), bits, self._counts.cumsum())


def near_boundary(
    weights: torch.Tensor, offset: float, dtype: torch.dtype, room: torch.Tensor
) -> torch.Tensor:
    """Positions of the weights that aren't published as one and the same bits throughout their
    error interval, increasing.

    Where an end of the interval isn't finite, as published, nothing is known either.

    Args:
        weights: float32 [items], contiguous.
        dtype: a floating-point one, published.
        room: float32 [2, items], overwritten.
    Returns:
        int64 [found].
    """
    if is_compiled(weights) and dtype == torch.bfloat16:
        return torch.from_numpy(
            cpu_loops.near_bf16_boundary(
                weights.numpy(), np.float32(SLOPE), np.float32(offset), room.numpy()
            )
        )
    error, end = room[0, : weights.numel()], room[1, : weights.numel()]
    torch.abs(weights, out=error).mul_(SLOPE).add_(offset)
    low = torch.sub(weights, error, out=end).to(dtype)
    high = torch.add(weights, error, out=end).to(dtype)
    near = integer_view(low) != integer_view(high)
    # Both ends may be the same infinity, or NaN: x - x is 0 for finite numbers only.
    return near.logical_or_(low.sub_(low) != 0).nonzero().view(-1)
