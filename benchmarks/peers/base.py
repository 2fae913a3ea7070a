"""What an emulated format must do: encode a step, and turn old weights into new ones."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from plait.weights import ArrayWeights, Weights

Stored = list[bytes]


@dataclass(frozen=True)
class Peer:
    """A published wire format, without its metadata: a lower bound of its real size.

    Attributes:
        encode: everything that is stored for a step, whole files or tensors.
        decode: writes it over the old weights.
    """

    name: str
    encode: Callable[[Weights, Weights], Stored]
    decode: Callable[[Stored, ArrayWeights], None]


def changes(
    old: Weights, new: Weights
) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.uint16]]]:
    """Name, flat positions and new values of every tensor that differs."""
    for tensor in old.layout.tensors:
        before, after = old.bits(tensor.name), new.bits(tensor.name)
        positions = np.flatnonzero(before != after)
        if positions.size:
            yield tensor.name, positions, after[positions]


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def unzstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)
