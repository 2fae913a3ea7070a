"""What deltas do to weights and to one another, compiled for each item size; releases the GIL.

Pieces are those of `plait.codec.scan`. As in `plait.codec.search`, nothing is checked here.
"""

from typing import Any, Final

import numpy as np
from numba import njit

from plait.codec.simd import prefetch
from plait.codec.terms import sum_terms

# Increments are made of this many changes at once, which the smallest cache holds.
_BLOCK: Final = 1 << 12

# Changes that are on their way from memory: measured best from 96 to 256.
_AHEAD: Final = 128


@njit(cache=True, nogil=True, inline="always")  # type: ignore[untyped-decorator]
def _ask_for(bits: Any, positions: Any, i: Any, shift: Any, end: Any) -> None:
    """Has the item of a later position fetched, if it lies in the same run as this one.

    A sparse delta touches a line of memory for nearly every change, in a pattern that no processor
    foresees: waiting for each takes three times as long as all the rest.
    """
    ahead = np.int64(positions[min(i + _AHEAD, positions.size - 1)])
    if ahead < end:
        prefetch(bits, ahead + shift)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def add_at(
    bits: Any, start: Any, run: Any, stride: Any, base: Any, positions: Any, differences: Any
) -> None:
    """Adds differences to the items of a piece at frame-local positions, which increase."""
    shift = start - base
    end = base + run
    for i in range(positions.size):
        _ask_for(bits, positions, i, shift, end)
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
    words = np.empty(_BLOCK, np.uint64)
    before = np.empty(_BLOCK, np.uint64)
    after = np.empty(_BLOCK, np.uint64)
    shift = start - base
    end = base + run
    for block in range(0, positions.size, _BLOCK):
        count = min(_BLOCK, positions.size - block)
        for i in range(count):
            _ask_for(bits, positions, block + i, shift, end)
            position = np.int64(positions[block + i])
            if position >= end:
                repeat = (position - base) // run
                shift = start + repeat * (stride - run) - base
                end = base + (repeat + 1) * run
            words[i] = origin + (position + shift) * width
            before[i] = bits[position + shift]
            after[i] = (before[i] + np.uint64(differences[block + i])) & mask
        plus = sum_terms(words, after, count, width)
        minus = sum_terms(words, before, count, width)
        lane0 += plus[0] - minus[0]
        lane1 += plus[1] - minus[1]
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
