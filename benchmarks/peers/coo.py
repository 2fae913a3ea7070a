"""Row and column deltas and new BF16 values, one zstd level 1 frame over all tensors: PULSE's
version 3.1 (grail).

Positions are sorted by row and column. The difference to the row before takes a byte where all of
a tensor's fit, else two or four; the column is a difference within its row and absolute at the
row's start, in two bytes or four.
"""

import struct

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.base import Peer, Stored, changes, unzstd, zstd
from plait.weights import ArrayWeights, Weights

_HEAD = struct.Struct("<IIII")


def encode(old: Weights, new: Weights) -> Stored:
    number = {tensor.name: i for i, tensor in enumerate(old.layout.tensors)}
    parts = []
    for name, positions, values in changes(old, new):
        rows, columns = np.divmod(positions, _columns(old.layout[name].shape))
        row_steps = np.diff(rows, prepend=0)
        starts = np.diff(rows, prepend=-1) != 0
        steps = np.where(starts, columns, np.diff(columns, prepend=0))
        row_bytes, step_bytes = _width(row_steps, 1), _width(steps, 2)
        parts += [
            _HEAD.pack(number[name], positions.size, row_bytes, step_bytes),
            row_steps.astype(f"<u{row_bytes}").tobytes(),
            steps.astype(f"<u{step_bytes}").tobytes(),
            values.tobytes(),
        ]
    return [zstd(b"".join(parts))]


def decode(stored: Stored, live: ArrayWeights) -> None:
    data = unzstd(stored[0])
    at = 0
    while at < len(data):
        number, count, row_bytes, step_bytes = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        row_steps = np.frombuffer(data, f"<u{row_bytes}", count, at).astype(np.int64)
        at += row_bytes * count
        steps = np.frombuffer(data, f"<u{step_bytes}", count, at).astype(np.int64)
        at += step_bytes * count
        values = np.frombuffer(data, np.uint16, count, at)
        at += 2 * count
        tensor = live.layout.tensors[number]
        starts = row_steps != 0
        starts[0] = True
        sums = np.cumsum(steps)
        first = np.maximum.accumulate(np.where(starts, np.arange(count), 0))
        columns = sums - (sums - steps)[first]
        positions = np.cumsum(row_steps) * _columns(tensor.shape) + columns
        live.bits(tensor.name)[positions] = values


def _columns(shape: tuple[int, ...]) -> int:
    return shape[-1] if shape else 1


def _width(steps: NDArray[np.int64], least: int) -> int:
    return max(least, next(size for size in (1, 2, 4) if int(steps.max()) < 1 << 8 * size))


PEER = Peer("delta-COO + BF16, zstd-1 (PULSE)", encode, decode)
