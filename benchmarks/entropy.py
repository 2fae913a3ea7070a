"""The least that any code could take for a step, computed from that very step."""

import numpy as np
from numpy.typing import NDArray

from plait.weights import Weights

_EXPONENT_SHIFT = 7  # of BF16
_EXPONENTS = 256


def independent_bytes(old: Weights, new: Weights) -> float:
    """If each element changed by itself with one probability, and each difference were drawn from
    one distribution."""
    elements = old.layout.total_elements
    differences = np.concatenate([_changes(old, new, t.name)[1] for t in old.layout.tensors])
    places = _places(np.array([elements]), np.array([differences.size]))
    return (places + _values(differences)) / 8


def exponent_bytes(old: Weights, new: Weights) -> float:
    """If both also depended on the tensor and the exponent of the old weight, which a receiver
    of a delta holds; the tables of probabilities are free."""
    total = 0.0
    groups: list[list[NDArray[np.uint16]]] = [[] for _ in range(_EXPONENTS)]
    for tensor in old.layout.tensors:
        changed, differences = _changes(old, new, tensor.name)
        exponents = _exponents(old.bits(tensor.name))
        held = np.bincount(exponents, minlength=_EXPONENTS)
        moved = np.bincount(exponents[changed], minlength=_EXPONENTS)
        total += _places(held, moved)
        for exponent in np.flatnonzero(moved):
            groups[exponent].append(differences[exponents[changed] == exponent])
    total += sum(_values(np.concatenate(group)) for group in groups if group)
    return total / 8


def _changes(old: Weights, new: Weights, name: str) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
    before, after = old.bits(name), new.bits(name)
    changed = np.flatnonzero(before != after)
    return changed, after[changed] - before[changed]


def _exponents(bits: NDArray[np.uint16]) -> NDArray[np.uint16]:
    return (bits >> np.uint16(_EXPONENT_SHIFT)) & np.uint16(_EXPONENTS - 1)


def _places(held: NDArray[np.int64], moved: NDArray[np.int64]) -> float:
    """Bits that say which of `held` elements are the `moved` ones, group by group."""
    mixed = (moved > 0) & (moved < held)
    all_, some = held[mixed].astype(float), moved[mixed].astype(float)
    share = some / all_
    return float(-(some * np.log2(share) + (all_ - some) * np.log2(1 - share)).sum())


def _values(differences: NDArray[np.uint16]) -> float:
    counts = np.unique(differences, return_counts=True)[1].astype(float)
    return float(-(counts * np.log2(counts / counts.sum())).sum())
