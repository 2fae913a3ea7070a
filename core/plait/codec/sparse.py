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
from plait.codec.simd import bits_set, lowest_bit
from plait.errors import ChunkInvalid
from plait.limits import RESTART_ELEMENTS

SKIP: Final = 255
_BLOCK: Final = RESTART_ELEMENTS

Marks = NDArray[np.uint32]

_CLASSES_PER_WORD: Final = 32
_LOW_BITS: Final = 0x5555_5555_5555_5555

# Of every byte of classes its four differences, those that are neither +1 nor -1 as zeros.
_UNITS: Final = np.array(
    [[(1, 0xFFFF, 0, 0)[byte >> 2 * i & 3] for i in range(4)] for byte in range(256)], np.uint16
).view(np.uint64)[:, 0]
_UNITS.flags.writeable = False

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
    named = _count_classes(classes)
    if named != (small.size, wide.size):
        raise ChunkInvalid(
            f"classes name {named[0]} small and {named[1]} raw differences, planes hold "
            f"{small.size} and {wide.size}"
        )
    # Whole words of classes are unpacked, whatever lies behind the last one.
    words = np.zeros(-(-count // _CLASSES_PER_WORD), np.uint64)
    words.view(np.uint8)[: classes.size] = classes
    differences = np.empty((words.size, _CLASSES_PER_WORD), np.uint16)
    if not _unpack_classes(words, _UNITS, small, wide, marks, differences.reshape(-1)):
        raise ChunkInvalid("restarts disagree with the classes before them")
    return differences.reshape(-1)[:count]


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
def _count_classes(classes: Any) -> Any:
    """How many differences are small, and how many raw."""
    small: Any = 0
    raw: Any = 0
    for i in range(classes.size):
        low = np.uint64(classes[i]) & np.uint64(_LOW_BITS & 0xFF)
        high = (np.uint64(classes[i]) >> np.uint64(1)) & np.uint64(_LOW_BITS & 0xFF)
        small += np.int64(bits_set(high & ~low))
        raw += np.int64(bits_set(high & low))
    return small, raw


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _unpack_classes(
    words: Any, units: Any, small: Any, raw: Any, marks: Any, differences: Any
) -> Any:
    """Fills `differences`; whether the marks agree. Both planes hold as many as classes name.

    First every byte's four units, from a table; then the few others over their zeros.
    """
    fours = differences.view(np.uint64)
    small_count: Any = 0
    raw_count: Any = 0
    block: Any = 0
    for w in range(words.size):
        word = words[w]
        for k in range(8):
            fours[8 * w + k] = units[np.int64((word >> np.uint64(8 * k)) & np.uint64(0xFF))]
        others = word & np.uint64(_LOW_BITS << 1)
        first = _CLASSES_PER_WORD * w
        while block < marks.shape[0] and marks[block, 1] < first + _CLASSES_PER_WORD:
            # Counts at a block's end, which may lie within the word.
            inside = np.uint64(2 * (np.int64(marks[block, 1]) - first))
            before = others & ((np.uint64(1) << inside) - np.uint64(1))
            raws = np.int64(bits_set(before & (word << np.uint64(1))))
            smalls = np.int64(bits_set(before)) - raws
            if marks[block, 2] != small_count + smalls or marks[block, 3] != raw_count + raws:
                return False
            block += 1
        while others:
            bit = lowest_bit(others)
            others &= others - np.uint64(1)
            if (word >> np.uint64(bit - 1)) & np.uint64(1):
                differences[first + (bit >> 1)] = raw[raw_count]
                raw_count += 1
            else:
                zigzag = np.int32(small[small_count])
                differences[first + (bit >> 1)] = np.uint16((zigzag >> 1) ^ -(zigzag & 1))
                small_count += 1
    for rest in range(block, marks.shape[0]):
        if marks[rest, 2] != small_count or marks[rest, 3] != raw_count:
            return False
    return True
