"""The class, small and raw planes: differences of 2-byte items, most of which are +1 or -1."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numba import njit

from plait.codec.gaps import Marks
from plait.codec.planes import Bytes
from plait.codec.simd import bits_set, lowest_bit
from plait.errors import ChunkInvalid

_CLASSES_PER_WORD: Final = 32
_LOW_BITS: Final = 0x5555_5555_5555_5555

# Of every byte of classes its four differences, those that are neither +1 nor -1 as zeros.
_UNITS: Final = np.array(
    [[(1, 0xFFFF, 0, 0)[byte >> 2 * i & 3] for i in range(4)] for byte in range(256)], np.uint16
).view(np.uint64)[:, 0]
_UNITS.flags.writeable = False

# Differences of one `small` byte: zigzag codes up to 255, of which 0, 1 and 2 have other places.
_SMALL_MIN: Final = 3


class Classes:
    """Differences of 2-byte items, unpacked block by block, on as many threads as there are blocks.

    Where the small and raw differences of a block begin is the marks' claim until all blocks have
    been unpacked: each proves that it holds what lies between its own claim and the next one's.

    Attributes:
        differences: uint16, room for whole words of classes.

    Raises:
        ChunkInvalid: planes that contradict each other or the count.
    """

    def __init__(self, count: int, marks: Marks, planes: Mapping[str, Bytes]) -> None:
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
        # Whole words of classes are unpacked, whatever lies behind the last one.
        self._words = np.zeros(-(-count // _CLASSES_PER_WORD), np.uint64)
        self._words.view(np.uint8)[: classes.size] = classes
        self._small, self._raw, self._marks = small, wide, marks
        self.differences = np.empty(self._words.size * _CLASSES_PER_WORD, np.uint16)
        behind = marks[marks[:, 1] >= self.differences.size, 2:]
        if (behind != (small.size, wide.size)).any():
            raise ChunkInvalid("restarts behind the last element don't name the planes' ends")

    def unpack(self, first: int, end: int) -> None:
        """Unpacks the blocks [first, end), and whole words.

        Raises:
            ChunkInvalid: they don't hold what the marks say.
        """
        start, stop = self._begin(first), self._begin(end)
        if not _unpack_classes(
            self._words, _UNITS, self._small, self._raw, self._marks, *start, *stop,
            self.differences,
        ):  # fmt: skip
            raise ChunkInvalid(
                f"classes of the restart blocks {first} to {end - 1} name other small and raw "
                "differences than there are by the restarts and the planes' sizes"
            )

    def _begin(self, block: int) -> tuple[int, int, int]:
        """The word in which a block begins, and the small and raw differences before that word."""
        if block == 0:
            return 0, 0, 0
        if block > self._marks.shape[0]:
            return self._words.size, self._small.size, self._raw.size
        _, element, smalls, raws = map(int, self._marks[block - 1])
        word, inside = divmod(element, _CLASSES_PER_WORD)
        if inside:
            before = int(self._words[word]) & ((1 << 2 * inside) - 1)
            raws_here = (before & before >> 1 & _LOW_BITS).bit_count()
            smalls -= (before >> 1 & _LOW_BITS).bit_count() - raws_here
            raws -= raws_here
        return word, smalls, raws


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def pack_classes(differences: Any, marks: Any, classes: Any, small: Any, raw: Any) -> Any:
    """Writes the planes, and the marks' last two columns; returns the small and raw counts.

    Branch-free: a difference's sign is a coin flip, and a branch on it costs 10 ns.
    """
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
def _count_classes(words: Any, first: Any, end: Any) -> Any:
    """How many differences of the words [first, end) are small, and how many raw."""
    small: Any = 0
    raw: Any = 0
    for w in range(first, end):
        low = words[w] & np.uint64(_LOW_BITS)
        high = (words[w] >> np.uint64(1)) & np.uint64(_LOW_BITS)
        small += np.int64(bits_set(high & ~low))
        raw += np.int64(bits_set(high & low))
    return small, raw


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _unpack_classes(
    words: Any, units: Any, small: Any, raw: Any, marks: Any,
    first_word: Any, first_small: Any, first_raw: Any,
    end_word: Any, end_small: Any, end_raw: Any,
    differences: Any,
) -> Any:  # fmt: skip
    """Fills in the `differences` of the words [first_word, end_word).

    Whether they hold what lies between the two places, and the marks within them agree.
    First every byte's four units, from a table; then the few others over their zeros.
    """
    if first_small < 0 or first_raw < 0 or end_small > small.size or end_raw > raw.size:
        return False
    named = _count_classes(words, first_word, end_word)
    if first_small + named[0] != end_small or first_raw + named[1] != end_raw:
        return False
    fours = differences.view(np.uint64)
    small_count = first_small
    raw_count = first_raw
    block: Any = 0
    while block < marks.shape[0] and marks[block, 1] < _CLASSES_PER_WORD * first_word:
        block += 1
    for w in range(first_word, end_word):
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
    return True
