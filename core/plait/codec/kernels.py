"""The loops of the delta algebra, compiled for each item size; they release the GIL.

None checks a bound: their callers in algebra.py do. A *piece* is `repeats` runs of `run` items of
one tensor, the first at item `start`, their starts `stride` items apart; `base` is the frame-local
number of its first item, and `origin` the word that the tensor begins with. Integers stay signed
64-bit except where the arithmetic is modular, since numba turns mixed signs into floats.
"""

from typing import Any, Final

import numpy as np
from numba import njit

from plait.codec.simd import LANES, differing, lowest_bit
from plait.fingerprint import _fmix64, _mix13

# The two phases of the scan (find, then look at what was found) share the cache by blocks of this.
_BLOCK: Final = 1 << 15


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _lanes(word: Any, value: Any, width: Any) -> Any:
    """Fingerprint terms of one item whose first of `width` words is `word`."""
    lane0 = np.uint64(0)
    lane1 = np.uint64(0)
    bits = np.uint64(value)
    for k in range(width):
        part = (bits >> np.uint64(16 * k)) & np.uint64(0xFFFF)
        key = (np.uint64(word + k) << np.uint64(16)) | part
        lane0 += _fmix64(key + np.uint64(0x9E3779B97F4A7C15))
        lane1 += _mix13(key + np.uint64(0xC2B2AE3D27D4EB4F))
    return lane0, lane1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _find(old: Any, new: Any, first: Any, end: Any, shift: Any, positions: Any, count: Any) -> Any:
    """Appends `item + shift` for every item of [first, end) that differs; returns the new count."""
    item = first
    while item + LANES <= end:
        mask = differing(old, new, item)
        while mask != np.uint64(0):
            positions[count] = item + lowest_bit(mask) + shift
            count += 1
            mask &= mask - np.uint64(1)
        item += LANES
    while item < end:
        if old[item] != new[item]:
            positions[count] = item + shift
            count += 1
        item += 1
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def scan_piece(
    old: Any, new: Any, start: Any, run: Any, stride: Any, repeats: Any, base: Any, origin: Any,
    width: Any, positions: Any, differences: Any, count: Any,
) -> Any:  # fmt: skip
    """Appends the changes of a piece; returns the new count and the increment's lanes."""
    lane0 = np.uint64(0)
    lane1 = np.uint64(0)
    for repeat in range(repeats):
        first = start + repeat * stride
        shift = base + repeat * run - first
        for block in range(first, first + run, _BLOCK):
            known = count
            end = min(block + _BLOCK, first + run)
            count = _find(old, new, block, end, shift, positions, count)
            for i in range(known, count):
                item = np.int64(positions[i]) - shift
                differences[i] = new[item] - old[item]
                before = _lanes(origin + item * width, old[item], width)
                after = _lanes(origin + item * width, new[item], width)
                lane0 += after[0] - before[0]
                lane1 += after[1] - before[1]
    return count, lane0, lane1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def add_at(
    bits: Any, start: Any, run: Any, stride: Any, base: Any, positions: Any, differences: Any
) -> None:
    """Adds differences to the items of a piece at frame-local positions, which increase."""
    shift = start - base
    end = base + run
    for i in range(positions.size):
        position = np.int64(positions[i])
        if position >= end:
            repeat = (position - base) // run
            shift = start + repeat * (stride - run) - base
            end = base + (repeat + 1) * run
        bits[position + shift] += differences[i]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def increment_at(
    bits: Any, start: Any, run: Any, stride: Any, base: Any, origin: Any, width: Any,
    positions: Any, differences: Any,
) -> Any:  # fmt: skip
    """Lanes of the increment that `add_at` would make; writes nothing."""
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - 8 * bits.itemsize)
    lane0 = np.uint64(0)
    lane1 = np.uint64(0)
    shift = start - base
    end = base + run
    for i in range(positions.size):
        position = np.int64(positions[i])
        if position >= end:
            repeat = (position - base) // run
            shift = start + repeat * (stride - run) - base
            end = base + (repeat + 1) * run
        item = position + shift
        changed = (np.uint64(bits[item]) + np.uint64(differences[i])) & mask
        before = _lanes(origin + item * width, bits[item], width)
        after = _lanes(origin + item * width, changed, width)
        lane0 += after[0] - before[0]
        lane1 += after[1] - before[1]
    return lane0, lane1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def merge(
    a_positions: Any, a_differences: Any, b_positions: Any, b_differences: Any,
    positions: Any, differences: Any,
) -> Any:  # fmt: skip
    """Adds two deltas into the output arrays, leaving out sums of zero; returns the count."""
    i = 0
    j = 0
    count: Any = 0
    while i < a_positions.size or j < b_positions.size:
        take_a = j == b_positions.size
        take_b = i == a_positions.size
        if not (take_a or take_b):
            take_a = a_positions[i] <= b_positions[j]
            take_b = b_positions[j] <= a_positions[i]
        differences[count] = 0
        if take_a:
            positions[count] = a_positions[i]
            differences[count] += a_differences[i]
            i += 1
        if take_b:
            positions[count] = b_positions[j]
            differences[count] += b_differences[j]
            j += 1
        count += np.int64(differences[count] != 0)
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def increases(positions: Any) -> Any:
    """Whether each position is larger than the one before."""
    broken: Any = 0
    for i in range(1, positions.size):
        broken += np.int64(positions[i] <= positions[i - 1])
    return broken == 0
