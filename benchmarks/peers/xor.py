"""Whole tensors, XOR with the base, one zstd level 1 frame each: SkyRL, slime, ModelExpress.

A tensor without a change is left out.
"""

import numpy as np

from benchmarks.peers.base import Peer, Stored, unzstd, zstd
from plait.weights import ArrayWeights, Weights


def encode(old: Weights, new: Weights) -> Stored:
    stored = []
    for tensor in old.layout.tensors:
        mixed = old.bits(tensor.name) ^ new.bits(tensor.name)
        stored.append(zstd(mixed.tobytes()) if mixed.any() else b"")
    return stored


def decode(stored: Stored, live: ArrayWeights) -> None:
    for tensor, data in zip(live.layout.tensors, stored, strict=True):
        if data:
            bits = live.bits(tensor.name)
            bits ^= np.frombuffer(unzstd(data), bits.dtype)


PEER = Peer("XOR, zstd-1 (SkyRL, slime)", encode, decode)
