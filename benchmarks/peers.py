"""What other systems would send for the same step: emulations of published wire formats.

Written from their descriptions, without their metadata, so each is a lower bound of the real size.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import zstandard

from plait.weights import ArrayWeights, Weights

_U16_MAX: Final = (1 << 16) - 1


def int32_and_bf16(old: Weights, new: Weights) -> int:
    """Flat int32 positions and new BF16 values, raw (verl, vLLM's sparse transfer)."""
    return sum(6 * _changed(old, new, name).size for name in _names(old))


def int32_and_bf16_zstd(old: Weights, new: Weights) -> int:
    """The same, through zstd level 1 (AReaL's store)."""
    total = 0
    for name in _names(old):
        positions = _changed(old, new, name)
        total += _zstd(positions.astype(np.int32).tobytes())
        total += _zstd(new.bits(name)[positions].tobytes())
    return total


def gaps_and_bf16_zstd(old: Weights, new: Weights) -> int:
    """Gaps less one in 16 bits, or 32 where one is too wide, and new values; zstd level 1
    (NeMo-RL's overwrite, near to PULSE's)."""
    total = 0
    for name in _names(old):
        positions = _changed(old, new, name)
        gaps = np.diff(positions, prepend=-1) - 1
        wide = bool(gaps.size) and int(gaps.max()) > _U16_MAX
        body = gaps.astype(np.uint32 if wide else np.uint16).tobytes()
        total += _zstd(body + new.bits(name)[positions].tobytes())
    return total


def xor_zstd(old: Weights, new: Weights) -> int:
    """Whole tensors, XOR with the base, zstd level 1 (slime, SkyRL, ModelExpress)."""
    return sum(_zstd((old.bits(name) ^ new.bits(name)).tobytes()) for name in _names(old))


PEERS: Final[Mapping[str, Callable[[ArrayWeights, ArrayWeights], int]]] = {
    "int32 + BF16, raw": int32_and_bf16,
    "int32 + BF16, zstd-1": int32_and_bf16_zstd,
    "gap16 + BF16, zstd-1": gaps_and_bf16_zstd,
    "XOR of whole tensors, zstd-1": xor_zstd,
}


def iid_limit_bytes(old: Weights, new: Weights) -> float:
    """Bytes for the whole step, if each element changed by itself with one probability, and each
    difference were drawn from one distribution: the entropy of both, from this very step."""
    elements = old.layout.total_elements
    differences = np.concatenate(
        [(new.bits(n) - old.bits(n))[_changed(old, new, n)] for n in _names(old)]
    )
    changed = differences.size
    share = changed / elements
    places = -changed * np.log2(share) - (elements - changed) * np.log2(1 - share)
    counts = np.unique(differences, return_counts=True)[1]
    values = -(counts * np.log2(counts / changed)).sum()
    return float(places + values) / 8


def _names(weights: Weights) -> list[str]:
    return [tensor.name for tensor in weights.layout.tensors]


def _changed(old: Weights, new: Weights, name: str) -> np.ndarray:
    return np.flatnonzero(old.bits(name) != new.bits(name))


def _zstd(data: bytes) -> int:
    return len(zstandard.ZstdCompressor(level=1).compress(data))
