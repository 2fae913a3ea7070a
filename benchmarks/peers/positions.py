"""Flat int32 positions and new BF16 values: AReaL-DTE's payload, also verl's and vLLM's.

They store a safetensors file of `<name>@delta_idx` and `<name>@delta_val`, which AReaL-DTE puts
through zstd level 1 as a whole. Here a tensor's name is its number, and zstd goes tensor by tensor.
"""

import struct

import numpy as np

from benchmarks.peers.base import Peer, Stored, changes, unzstd, zstd
from plait.weights import ArrayWeights, Weights

_HEAD = struct.Struct("<II")


def encode(old: Weights, new: Weights) -> Stored:
    number = {tensor.name: i for i, tensor in enumerate(old.layout.tensors)}
    return [
        _HEAD.pack(number[name], positions.size)
        + positions.astype(np.int32).tobytes()
        + values.tobytes()
        for name, positions, values in changes(old, new)
    ]


def decode(stored: Stored, live: ArrayWeights) -> None:
    for data in stored:
        number, count = _HEAD.unpack_from(data)
        positions = np.frombuffer(data, np.int32, count, _HEAD.size)
        values = np.frombuffer(data, np.uint16, count, _HEAD.size + 4 * count)
        live.bits(live.layout.tensors[number].name)[positions] = values


def encode_zstd(old: Weights, new: Weights) -> Stored:
    return [zstd(data) for data in encode(old, new)]


def decode_zstd(stored: Stored, live: ArrayWeights) -> None:
    decode([unzstd(data) for data in stored], live)


RAW = Peer("int32 + BF16, raw (verl, vLLM)", encode, decode)
PACKED = Peer("int32 + BF16, zstd-1 (AReaL-DTE)", encode_zstd, decode_zstd)
