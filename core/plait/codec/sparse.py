"""Sparse planes of 1- and 2-byte items: gaps and differences.

`gap` holds distances minus one, a byte each; 255 skips 255 items and stands for no element. Gaps
are nearly geometric, so cutting them at 255 loses nothing against any integer code. 2-byte
differences have a 2-bit `class`, four to a byte: two zigzag bytes where they fit one (`small`), the
16 bits as they are (`raw`), and nothing at all for +1 and -1, which nine in ten are. 1-byte
differences are one plane, `byte`. `restart` holds, for every 2^20 items but the first, where their
part of each decoded plane begins; the gap count starts anew there.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from plait.codec.planes import Bytes
from plait.errors import ChunkInvalid
from plait.limits import RESTART_ELEMENTS

SKIP: Final = 255
_BLOCK: Final = RESTART_ELEMENTS

Marks = NDArray[np.uint32]

# Differences of one `small` byte: zigzag codes up to 255, of which 0, 1 and 2 have other places.
_SMALL_MIN: Final = 3


def encode_sparse(
    items: int, positions: NDArray[np.uint32], differences: NDArray[Any]
) -> dict[str, NDArray[Any]]:
    """The decoded planes of a delta, empty ones included.

    Args:
        items: of the frame.
        positions: uint32 [count], increasing, below `items`.
        differences: uint8 or uint16 [count], none of them 0.
    """
    narrow = differences.itemsize == 1
    marks = np.zeros((_blocks(items) - 1, 2 if narrow else 4), np.uint32)
    gaps = np.empty(positions.size + items // SKIP + 1, np.uint8)
    used = _pack_gaps(positions, marks, gaps)
    planes: dict[str, NDArray[Any]] = {"gap": gaps[:used]}
    if narrow:
        planes["byte"] = differences
    else:
        classes = np.zeros((differences.size + 3) // 4, np.uint8)
        small = np.empty(differences.size + 1, np.uint8)
        raw = np.empty(differences.size + 1, np.uint16)
        small_count, raw_count = _pack_classes(differences, marks, classes, small, raw)
        planes |= {"class": classes, "small": small[:small_count], "raw": raw[:raw_count]}
    return planes | {"restart": marks}


def sizes_allowed(items: int, count: int, item_bytes: int) -> dict[str, tuple[int, int]]:
    """Least and most bytes of every plane of a delta that changes `count` of `items` items."""
    blocks = _blocks(items)
    gap = (count, count + items // SKIP)
    if item_bytes == 1:
        return {"gap": gap, "byte": (count, count), "restart": (8 * (blocks - 1),) * 2}
    classes = (count + 3) // 4
    return {
        "gap": gap,
        "class": (classes, classes),
        "small": (0, count),
        "raw": (0, 2 * count),
        "restart": (16 * (blocks - 1),) * 2,
    }


def decode_sparse(
    items: int, count: int, item_bytes: int, planes: Mapping[str, Bytes]
) -> tuple[NDArray[np.uint32], NDArray[Any]]:
    """Positions and differences from decoded planes, whose sizes are within `sizes_allowed`.

    Raises:
        ChunkInvalid: planes that contradict each other, the count or the frame.
    """
    columns = 2 if item_bytes == 1 else 4
    marks = planes["restart"].view("<u4").reshape(-1, columns)
    gaps = planes["gap"]
    _check_marks(marks, gaps.size, count)
    positions = np.empty(gaps.size + 1, np.uint32)
    if not _unpack_gaps(gaps, marks, items, count, positions):
        raise ChunkInvalid(
            f"gap plane doesn't lead to {count} of {items} items, or not by restarts"
        )
    if item_bytes == 1:
        return positions[:count], planes["byte"]
    return positions[:count], _decode_classes(count, marks, planes)


def _decode_classes(count: int, marks: Marks, planes: Mapping[str, Bytes]) -> NDArray[np.uint16]:
    classes, small, raw = planes["class"], planes["small"], planes["raw"]
    if raw.size % 2:
        raise ChunkInvalid(f"raw plane of {raw.size} bytes; expected an even number")
    wide = raw.view("<u2")
    if small.size and small.min() < _SMALL_MIN:
        raise ChunkInvalid(f"small plane holds the code {small.min()}; at least {_SMALL_MIN}")
    if wide.size and (wide + np.uint16(128)).min() < 256:
        raise ChunkInvalid("raw plane holds a difference that belongs to another class")
    if count % 4 and int(classes[-1]) >> 2 * (count % 4):
        raise ChunkInvalid("class plane goes on after the last element")
    differences = np.empty(count, np.uint16)
    # The kernel reads one item of each plane even where none is meant.
    padded = [plane if plane.size else np.zeros(1, plane.dtype) for plane in (small, wide)]
    for plane in padded:
        plane.flags.writeable = False
    used = _unpack_classes(classes, *padded, marks, differences)
    if used != (small.size, wide.size):
        raise ChunkInvalid(
            f"classes name {used[0]} small and {used[1]} raw differences, planes hold "
            f"{small.size} and {wide.size}, or restarts disagree"
        )
    return differences


def _blocks(items: int) -> int:
    return -(-items // _BLOCK)


def _check_marks(marks: Marks, gap_bytes: int, count: int) -> None:
    ends = np.array([[gap_bytes, count]], np.int64)
    steps = np.diff(np.concatenate([np.zeros((1, 2), np.int64), marks[:, :2], ends]), axis=0)
    if (steps < 0).any():
        raise ChunkInvalid("restart plane goes back, or beyond the planes' ends")


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _pack_gaps(positions: Any, marks: Any, gaps: Any) -> Any:
    used: Any = 0
    block: Any = 0
    block_end: Any = _BLOCK
    last: Any = -1
    for i in range(positions.size):
        position = np.int64(positions[i])
        if position >= block_end:
            for passed in range(block, position // _BLOCK):
                marks[passed, 0] = used
                marks[passed, 1] = i
            block = position // _BLOCK
            last = block * _BLOCK - 1
            block_end = (block + 1) * _BLOCK
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
def _unpack_gaps(gaps: Any, marks: Any, items: Any, count: Any, positions: Any) -> Any:
    """Fills `positions` (gaps.size + 1 long); whether every block holds what its marks say."""
    element: Any = 0
    byte: Any = 0
    for block in range(marks.shape[0] + 1):
        inside = block < marks.shape[0]
        byte_end = np.int64(marks[block, 0]) if inside else np.int64(gaps.size)
        element_end = np.int64(marks[block, 1]) if inside else np.int64(count)
        known = element
        position = block * _BLOCK - element
        # Branch-free: the place is written each time and kept only where an element ends there.
        for i in range(byte, byte_end):
            gap = np.int64(gaps[i])
            position += gap
            positions[element] = position + element
            element += np.int64(gap != SKIP)
        if element != element_end or (byte < byte_end and gaps[byte_end - 1] == SKIP):
            return False
        if element > known and position + element - 1 >= min((block + 1) * _BLOCK, items):
            return False
        byte = byte_end
    return True


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _pack_classes(differences: Any, marks: Any, classes: Any, small: Any, raw: Any) -> Any:
    """Branch-free: a difference's sign is a coin flip, and a branch on it costs 10 ns."""
    small_count: Any = 0
    raw_count: Any = 0
    packed = np.int32(0)
    first: Any = 0
    for block in range(marks.shape[0] + 1):
        inside = block < marks.shape[0]
        end = np.int64(marks[block, 1]) if inside else np.int64(differences.size)
        for i in range(first, end):
            value = differences[i]
            signed = np.int32(np.int16(value))
            zigzag = ((signed << 1) ^ (signed >> 15)) & 0xFFFF
            plus = np.int32(value == 1)
            minus = np.int32(value == 0xFFFF)
            name = minus + (1 - plus - minus) * (2 + np.int32(zigzag > 255))
            small[small_count] = zigzag
            small_count += np.int64(name == 2)
            raw[raw_count] = value
            raw_count += np.int64(name == 3)
            packed |= name << np.int32(2 * (i & 3))
            classes[i >> 2] = packed
            packed *= np.int32((i & 3) != 3)
        if inside:
            marks[block, 2] = small_count
            marks[block, 3] = raw_count
        first = end
    return small_count, raw_count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _unpack_classes(classes: Any, small: Any, raw: Any, marks: Any, differences: Any) -> Any:
    """Fills `differences`; the small and raw differences used, or (-1, -1) if marks disagree."""
    small_count: Any = 0
    raw_count: Any = 0
    first: Any = 0
    for block in range(marks.shape[0] + 1):
        inside = block < marks.shape[0]
        end = np.int64(marks[block, 1]) if inside else np.int64(differences.size)
        for i in range(first, end):
            name = (np.int32(classes[i >> 2]) >> np.int32(2 * (i & 3))) & 3
            zigzag = np.int32(small[min(small_count, small.size - 1)])
            value = np.int32(raw[min(raw_count, raw.size - 1)])
            is_small = np.int32(name == 2)
            is_raw = np.int32(name == 3)
            unit = (1 - 2 * name) * (1 - is_small - is_raw)
            unfolded = (zigzag >> 1) ^ -(zigzag & 1)
            differences[i] = np.uint16(unit + unfolded * is_small + value * is_raw)
            small_count += is_small
            raw_count += is_raw
        if inside and (marks[block, 2] != small_count or marks[block, 3] != raw_count):
            return -1, -1
        first = end
    return small_count, raw_count
