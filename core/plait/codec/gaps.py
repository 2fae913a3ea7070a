"""The gap plane: distances between changes, a byte each, in blocks that begin anew.

*Marks* are the restart plane's rows, one for every block but the first: where its part of each
decoded plane begins, the gap bytes first, then the elements.
"""

from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from plait.errors import ChunkInvalid
from plait.limits import RESTART_ELEMENTS

# A gap byte that skips as many items and stands for no element.
SKIP: Final = 255

Marks = NDArray[np.uint32]


def blocks_of(items: int) -> int:
    """How many blocks a frame of so many items has."""
    return -(-items // RESTART_ELEMENTS)


def check_marks(marks: Marks, gap_bytes: int, count: int) -> None:
    """That blocks lie one behind the other, within so many gap bytes and elements.

    Raises:
        ChunkInvalid: they don't.
    """
    ends = np.array([[gap_bytes, count]], np.int64)
    steps = np.diff(np.concatenate([np.zeros((1, 2), np.int64), marks[:, :2], ends]), axis=0)
    if (steps < 0).any():
        raise ChunkInvalid("restart plane goes back, or beyond the planes' ends")
    # Each element has a byte: so no block writes beyond what there is room for.
    if (steps[:, 1] > steps[:, 0]).any():
        raise ChunkInvalid("restart plane has a block of more elements than gap bytes")


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def pack_gaps(positions: Any, marks: Any, gaps: Any) -> Any:
    """Writes the gap bytes, and the marks' first two columns; returns how many bytes there are.

    Args:
        positions: uint32, strictly increasing.
        gaps: uint8, room for all.
    """
    used: Any = 0
    block: Any = 0
    block_end: Any = RESTART_ELEMENTS
    last: Any = -1
    for i in range(positions.size):
        position = np.int64(positions[i])
        if position >= block_end:
            for passed in range(block, position // RESTART_ELEMENTS):
                marks[passed, 0] = used
                marks[passed, 1] = i
            block = position // RESTART_ELEMENTS
            last = block * RESTART_ELEMENTS - 1
            block_end = (block + 1) * RESTART_ELEMENTS
        gap = position - last - 1
        last = position
        while gap >= SKIP:
            gaps[used] = SKIP
            used += 1
            gap -= SKIP
        gaps[used] = gap
        used += 1
    for passed in range(block, marks.shape[0]):
        marks[passed, 0] = used
        marks[passed, 1] = positions.size
    return used


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def unpack_gaps(
    gaps: Any, marks: Any, items: Any, count: Any, positions: Any, first: Any, end: Any
) -> Any:
    """Fills in the `positions` (gaps.size + 1 in all) of the blocks [first, end).

    Whether each holds what its marks say; only if it does, nothing of another block was written.
    """
    element = np.int64(marks[first - 1, 1]) if first else np.int64(0)
    byte = np.int64(marks[first - 1, 0]) if first else np.int64(0)
    for block in range(first, end):
        inside = block < marks.shape[0]
        byte_end = np.int64(marks[block, 0]) if inside else np.int64(gaps.size)
        element_end = np.int64(marks[block, 1]) if inside else np.int64(count)
        known = element
        position = block * RESTART_ELEMENTS - element
        # Branch-free: the place is written each time and kept only where an element ends there.
        for i in range(byte, byte_end):
            gap = np.int64(gaps[i])
            position += gap
            positions[element] = position + element
            element += np.int64(gap != SKIP)
        if element != element_end or (byte < byte_end and gaps[byte_end - 1] == SKIP):
            return False
        if element > known and position + element - 1 >= min((block + 1) * RESTART_ELEMENTS, items):
            return False
        byte = byte_end
    return True
