"""16-bit gaps (32-bit where one is wider) and new BF16 values, zstd level 1: slime's former index,
and NeMo-RL's overwrite."""

import struct

import numpy as np

from benchmarks.peers.base import Peer, Stored, changes, unzstd, zstd
from plait.weights import ArrayWeights, Weights

_HEAD = struct.Struct("<III")
_U16_MAX = (1 << 16) - 1


def encode(old: Weights, new: Weights) -> Stored:
    number = {tensor.name: i for i, tensor in enumerate(old.layout.tensors)}
    stored = []
    for name, positions, values in changes(old, new):
        gaps = np.diff(positions, prepend=-1) - 1
        width = 4 if int(gaps.max()) > _U16_MAX else 2
        body = gaps.astype(f"<u{width}").tobytes() + values.tobytes()
        stored.append(_HEAD.pack(number[name], positions.size, width) + zstd(body))
    return stored


def decode(stored: Stored, live: ArrayWeights) -> None:
    for data in stored:
        number, count, width = _HEAD.unpack_from(data)
        body = unzstd(data[_HEAD.size :])
        gaps = np.frombuffer(body, f"<u{width}", count)
        positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
        values = np.frombuffer(body, np.uint16, count, width * count)
        live.bits(live.layout.tensors[number].name)[positions] = values


PEER = Peer("u16 gaps + BF16, zstd-1 (slime's index)", encode, decode)
