"""Detection: what changed in the pieces of frames, and its increment, compiled; releases the GIL.

A *piece* is `repeats` runs of `run` items of one tensor, the first at item `start`, their starts
`stride` items apart; `base` is the frame-local number of its first item, and `origin` the word that
the tensor begins with. As in `plait.codec.search`, nothing is checked here.
"""

from typing import Any

import numpy as np
from numba import njit

from plait.codec.search import BLOCK, SLACK, find, find_all
from plait.codec.terms import sum_terms


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _scan(
    old: Any, new: Any, start: Any, run: Any, stride: Any, repeats: Any, base: Any, origin: Any,
    width: Any, positions: Any, differences: Any, count: Any, words: Any, before: Any, after: Any,
) -> Any:  # fmt: skip
    """As `scan_piece`; the last three, 2 * BLOCK uint64 and items of both, are scratch."""
    lane0 = np.uint64(0)
    lane1 = np.uint64(0)
    held: Any = 0
    # Short runs are searched several at a time: a loop over the few changes of one costs more
    # than they do. Half an item keeps the reciprocal's error away from where a run begins.
    group = max(BLOCK // run, 1)
    jump = stride - run if repeats > 1 else 0
    reciprocal = 1.0 / run
    for row in range(0, repeats, group):
        for block in range(0, run, BLOCK):
            known = count
            count = find(
                old, new, start + row * stride + block, min(BLOCK, run - block), stride,
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
            if held >= BLOCK:
                plus = sum_terms(words, after, held, width)
                minus = sum_terms(words, before, held, width)
                lane0 += plus[0] - minus[0]
                lane1 += plus[1] - minus[1]
                held = 0
    plus = sum_terms(words, after, held, width)
    minus = sum_terms(words, before, held, width)
    return count, lane0 + plus[0] - minus[0], lane1 + plus[1] - minus[1]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def scan_piece(
    old: Any, new: Any, start: Any, run: Any, stride: Any, repeats: Any, base: Any, origin: Any,
    width: Any, positions: Any, differences: Any, count: Any,
) -> Any:  # fmt: skip
    """Appends the changes of a piece; returns the new count and the increment's lanes."""
    words = np.empty(2 * BLOCK, np.uint64)
    before = np.empty(2 * BLOCK, differences.dtype)
    after = np.empty(2 * BLOCK, differences.dtype)
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
    words = np.empty(2 * BLOCK, np.uint64)
    before = np.empty(2 * BLOCK, differences.dtype)
    after = np.empty(2 * BLOCK, differences.dtype)
    for k in range(table.shape[0]):
        ends[k + 1], lanes[k, 0], lanes[k, 1] = _scan(
            old, new, table[k, 0], table[k, 1], table[k, 2], table[k, 3], table[k, 4],
            origin, width, positions, differences, ends[k], words, before, after,
        )  # fmt: skip


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
    count = find_all(old, new, places, before, after)
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
        plus = sum_terms(words[mine], now[mine], own, width)
        minus = sum_terms(words[mine], was[mine], own, width)
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
