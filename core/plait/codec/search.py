"""Which items differ between two versions, compiled for each item size; releases the GIL.

Nothing checks a bound, or that arrays are contiguous: the callers in algebra.py and sweep.py do.
Integers stay signed 64-bit except where the arithmetic is modular, since numba turns mixed signs
into floats.
"""

from typing import Any, Final

import numpy as np
from numba import njit

from plait.codec.simd import LANES, bits_set, differing, lowest_bit

# The phases of a loop (find, fetch, hash) hand each other blocks of this many items: two versions
# of one and what was found in it fit the smallest cache.
BLOCK: Final = 1 << 12

# Positions written for every vector of items, changed or not: so much more room an output needs.
SLACK: Final = 4


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def find(
    old: Any, new: Any, start: Any, length: Any, stride: Any, rows: Any, base: Any, run: Any,
    positions: Any, count: Any,
) -> Any:  # fmt: skip
    """Appends the frame-local positions of the items that differ; returns the new count.

    Row r holds the items from `start + r * stride` on, `length` of them, and begins at the
    position `base + r * run`. Writes up to `SLACK` positions past the last one.
    """
    for row in range(rows):
        item = start + row * stride
        end = item + length
        shift = base + row * run - item
        while item + 2 * LANES <= end:
            if (differing(old, new, item) | differing(old, new, item + LANES)) != np.uint64(0):
                for first in (item, item + LANES):
                    mask = differing(old, new, first)
                    found = bits_set(mask)
                    # Near 1 % a branch for each change is mispredicted more often than not: a few
                    # places are written in any case, and a loop takes over where there are more.
                    for i in range(SLACK):
                        positions[count + i] = first + lowest_bit(mask) + shift
                        mask &= mask - np.uint64(1)
                    for i in range(SLACK, found):
                        positions[count + i] = first + lowest_bit(mask) + shift
                        mask &= mask - np.uint64(1)
                    count += found
            item += 2 * LANES
        if item < end:
            count = _find_rest(old, new, item, end, shift, positions, count)
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _find_rest(
    old: Any, new: Any, item: Any, end: Any, shift: Any, positions: Any, count: Any
) -> Any:
    """As `find`, for the items of [item, end), fewer than two vectors."""
    while item < end and old.size >= LANES:
        # A vector may reach beyond the end, or begin before the item: those bits don't count.
        first = min(item, old.size - LANES)
        mask = differing(old, new, first) >> np.uint64(item - first)
        if end - item < LANES:
            mask &= (np.uint64(1) << np.uint64(end - item)) - np.uint64(1)
        found = bits_set(mask)
        for i in range(found):
            positions[count + i] = item + lowest_bit(mask) + shift
            mask &= mask - np.uint64(1)
        count += found
        item += LANES
    while item < end:
        positions[count] = item + shift
        count += np.int64(old[item] != new[item])
        item += 1
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def find_all(old: Any, new: Any, places: Any, before: Any, after: Any) -> Any:
    """Which items differ, and their bits, fetched while they are in the cache; returns how many."""
    count: Any = 0
    for first in range(0, old.size, BLOCK):
        known = count
        length = min(BLOCK, old.size - first)
        count = find(old, new, first, length, 0, 1, first, 0, places, count)
        for i in range(known, count):
            before[i] = old[places[i]]
            after[i] = new[places[i]]
    return count
