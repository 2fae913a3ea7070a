"""The loops of the delta algebra, compiled for each item size; they release the GIL.

None checks a bound, or that arrays are contiguous: their callers in algebra.py do. A *piece* is
`repeats` runs of `run` items of one tensor, the first at item `start`, their starts `stride` items
apart; `base` is the frame-local number of its first item, and `origin` the word that the tensor
begins with. Integers stay signed 64-bit except where the arithmetic is modular, since numba turns
mixed signs into floats.
"""

from typing import Any, Final

import numpy as np
from numba import njit

from plait.codec.simd import LANES, bits_set, differing, lowest_bit, prefetch
from plait.fingerprint import SEED_0, SEED_1, fmix64, mix13

# The phases of a loop (find, fetch, hash) hand each other blocks of this many items: two versions
# of one and what was found in it fit the smallest cache.
_BLOCK: Final = 1 << 12

# Changes that are on their way from memory: measured best from 64 up.
_AHEAD: Final = 128

# Positions written for every vector of items, changed or not: so much more room an output needs.
SLACK: Final = 4


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _sum_terms(words: Any, values: Any, count: Any, width: Any) -> Any:
    """Fingerprint of `count` items, of which `words` names the first of `width` words."""
    lane0 = np.uint64(0)
    lane1 = np.uint64(0)
    for k in range(width):
        shift = np.uint64(16 * k)
        for i in range(count):
            part = (np.uint64(values[i]) >> shift) & np.uint64(0xFFFF)
            key = ((words[i] + np.uint64(k)) << np.uint64(16)) | part
            lane0 += fmix64(key + SEED_0)
            lane1 += mix13(key + SEED_1)
    return lane0, lane1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _find(
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
    """As `_find`, for the items of [item, end), fewer than two vectors."""
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
def _scan(
    old: Any, new: Any, start: Any, run: Any, stride: Any, repeats: Any, base: Any, origin: Any,
    width: Any, positions: Any, differences: Any, count: Any, words: Any, before: Any, after: Any,
) -> Any:  # fmt: skip
    """As `scan_piece`; the last three, 2 * _BLOCK uint64 and items of both, are scratch."""
    lane0 = np.uint64(0)
    lane1 = np.uint64(0)
    held: Any = 0
    # Short runs are searched several at a time: a loop over the few changes of one costs more
    # than they do. Half an item keeps the reciprocal's error away from where a run begins.
    group = max(_BLOCK // run, 1)
    jump = stride - run if repeats > 1 else 0
    reciprocal = 1.0 / run
    for row in range(0, repeats, group):
        for block in range(0, run, _BLOCK):
            known = count
            count = _find(
                old, new, start + row * stride + block, min(_BLOCK, run - block), stride,
                min(group, repeats - row), base + row * run + block, run, positions, count,
            )  # fmt: skip
            for i in range(known, count):
                item = np.int64(positions[i]) - base + start
                if jump:
                    item += np.int64((item - start + 0.5) * reciprocal) * jump
                words[held] = origin + item * width
                before[held] = old[item]
                after[held] = new[item]
                differences[i] = after[held] - before[held]
                held += 1
            # Hashing many at once keeps its vectors full.
            if held >= _BLOCK:
                plus = _sum_terms(words, after, held, width)
                minus = _sum_terms(words, before, held, width)
                lane0 += plus[0] - minus[0]
                lane1 += plus[1] - minus[1]
                held = 0
    plus = _sum_terms(words, after, held, width)
    minus = _sum_terms(words, before, held, width)
    return count, lane0 + plus[0] - minus[0], lane1 + plus[1] - minus[1]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def scan_piece(
    old: Any, new: Any, start: Any, run: Any, stride: Any, repeats: Any, base: Any, origin: Any,
    width: Any, positions: Any, differences: Any, count: Any,
) -> Any:  # fmt: skip
    """Appends the changes of a piece; returns the new count and the increment's lanes."""
    words = np.empty(2 * _BLOCK, np.uint64)
    before = np.empty(2 * _BLOCK, differences.dtype)
    after = np.empty(2 * _BLOCK, differences.dtype)
    return _scan(
        old, new, start, run, stride, repeats, base, origin, width, positions, differences, count,
        words, before, after,
    )  # fmt: skip


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def scan_pieces(
    old: Any, new: Any, table: Any, origin: Any, width: Any, positions: Any, differences: Any,
    ends: Any, lanes: Any,
) -> None:  # fmt: skip
    """`scan_piece` for every row (start, run, stride, repeats, base) of a table.

    The changes of piece k are written to [ends[k], ends[k + 1]), those of the first to where the
    caller's ends[0] says; its increment to lanes[k].
    """
    words = np.empty(2 * _BLOCK, np.uint64)
    before = np.empty(2 * _BLOCK, differences.dtype)
    after = np.empty(2 * _BLOCK, differences.dtype)
    for k in range(table.shape[0]):
        ends[k + 1], lanes[k, 0], lanes[k, 1] = _scan(
            old, new, table[k, 0], table[k, 1], table[k, 2], table[k, 3], table[k, 4],
            origin, width, positions, differences, ends[k], words, before, after,
        )  # fmt: skip


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _find_all(old: Any, new: Any, places: Any, before: Any, after: Any) -> Any:
    """Which items differ, and their bits, fetched while they are in the cache; returns how many."""
    count: Any = 0
    for first in range(0, old.size, _BLOCK):
        known = count
        length = min(_BLOCK, old.size - first)
        count = _find(old, new, first, length, 0, 1, first, 0, places, count)
        for i in range(known, count):
            before[i] = old[places[i]]
            after[i] = new[places[i]]
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def scan_columns(
    old: Any, new: Any, start: Any, stride: Any, owner: Any, blocks: Any, origin: Any, width: Any,
    positions: Any, differences: Any, ends: Any, lanes: Any,
) -> None:  # fmt: skip
    """Changes of adjacent items, the first at item `start`, dealt out to blocks of columns.

    Rows are `stride` items long. `owner` has the block of every column, or -1; a block is a row
    (base, first row, rows, run, first column) of `blocks`. The changes of block b are written to
    [ends[b], ends[b + 1]), those of the first to where the caller's ends[0] says, and their
    increment to lanes[b].
    """
    places = np.empty(old.size + SLACK, np.uint32)
    before = np.empty(old.size, differences.dtype)
    after = np.empty(old.size, differences.dtype)
    count = _find_all(old, new, places, before, after)
    owners = np.empty(count, np.int32)
    used = np.zeros(blocks.shape[0] + 2, np.int64)
    reciprocal = 1.0 / stride
    for i in range(count):
        item = start + np.int64(places[i])
        row = np.int64((item + 0.5) * reciprocal)
        block: Any = np.int64(owner[item - row * stride])
        if block >= 0 and not 0 <= row - blocks[block, 1] < blocks[block, 2]:
            block = -1
        owners[i] = block
        used[block + 2] += 1  # used[1] counts what belongs to none
    used[1] = 0
    base = ends[0]
    for block in range(blocks.shape[0]):
        used[block + 2] += used[block + 1]
        ends[block + 1] = base + used[block + 2]
    words = np.empty(count, np.uint64)
    was = np.empty(count, differences.dtype)
    now = np.empty(count, differences.dtype)
    for i in range(count):
        block = np.int64(owners[i])
        if block < 0:
            continue
        item = start + np.int64(places[i])
        row = np.int64((item + 0.5) * reciprocal)
        at = used[block + 1]
        used[block + 1] += 1
        column = item - row * stride - blocks[block, 4]
        position = blocks[block, 0] + (row - blocks[block, 1]) * blocks[block, 3] + column
        positions[base + at] = position
        differences[base + at] = after[i] - before[i]
        words[at] = origin + item * width
        was[at] = before[i]
        now[at] = after[i]
    for block in range(blocks.shape[0]):
        mine = slice(ends[block] - base, ends[block + 1] - base)
        own = ends[block + 1] - ends[block]
        plus = _sum_terms(words[mine], now[mine], own, width)
        minus = _sum_terms(words[mine], was[mine], own, width)
        lanes[block, 0] = plus[0] - minus[0]
        lanes[block, 1] = plus[1] - minus[1]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def gather_changes(
    found: Any, steps: Any, firsts: Any, ends: Any, positions: Any, differences: Any
) -> None:
    """Copies the changes [firsts[k], ends[k]) of what was found, one behind the other."""
    count: Any = 0
    for k in range(firsts.size):
        own = ends[k] - firsts[k]
        positions[count : count + own] = found[firsts[k] : ends[k]]
        differences[count : count + own] = steps[firsts[k] : ends[k]]
        count += own


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
        plus = _sum_terms(words, after, count, width)
        minus = _sum_terms(words, before, count, width)
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
