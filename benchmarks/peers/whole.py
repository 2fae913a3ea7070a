"""The whole checkpoint, raw: what reloading from disk or a broadcast moves."""

import numpy as np

from benchmarks.peers.base import Peer, Stored
from plait.weights import ArrayWeights, Weights


def encode(_old: Weights, new: Weights) -> Stored:
    return [new.bits(tensor.name).tobytes() for tensor in new.layout.tensors]


def decode(stored: Stored, live: ArrayWeights) -> None:
    for tensor, data in zip(live.layout.tensors, stored, strict=True):
        bits = live.bits(tensor.name)
        bits[:] = np.frombuffer(data, bits.dtype)


PEER = Peer("whole checkpoint", encode, decode)
