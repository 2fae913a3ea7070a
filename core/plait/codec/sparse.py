"""Sparse planes of 1- and 2-byte items: gaps and differences.

`gap` holds distances minus one, a byte each; 255 skips 255 items and stands for no element. Gaps
are nearly geometric, so cutting them at 255 loses nothing against any integer code. 2-byte
differences have a 2-bit `class`, four to a byte: two zigzag bytes where they fit one (`small`), the
16 bits as they are (`raw`), and nothing at all for +1 and -1, which nine in ten are. 1-byte
differences are one plane, `byte`. `restart` holds, for every 2^20 items but the first, where their
part of each decoded plane begins; the gap count starts anew there.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from plait.codec.classes import Classes, pack_classes
from plait.codec.gaps import SKIP, blocks_of, check_marks, pack_gaps, unpack_gaps
from plait.codec.planes import Bytes
from plait.errors import ChunkInvalid
from plait.workers import Workers

# Fewer elements are unpacked before another thread has woken up.
_SHARED_COUNT_MIN: Final = 1 << 19


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
    marks = np.zeros((blocks_of(items) - 1, 2 if narrow else 4), np.uint32)
    gaps = np.empty(positions.size + items // SKIP + 1, np.uint8)
    used = pack_gaps(positions, marks, gaps)
    planes: dict[str, NDArray[Any]] = {"gap": gaps[:used]}
    if narrow:
        planes["byte"] = differences
    else:
        classes = np.zeros((differences.size + 3) // 4, np.uint8)
        small = np.empty(differences.size + 1, np.uint8)
        raw = np.empty(differences.size + 1, np.uint16)
        small_count, raw_count = pack_classes(differences, marks, classes, small, raw)
        planes |= {"class": classes, "small": small[:small_count], "raw": raw[:raw_count]}
    return planes | {"restart": marks}


def sizes_allowed(items: int, count: int, item_bytes: int) -> dict[str, tuple[int, int]]:
    """Least and most bytes of every plane of a delta that changes `count` of `items` items."""
    blocks = blocks_of(items)
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
    items: int,
    count: int,
    item_bytes: int,
    planes: Mapping[str, Bytes],
    workers: Workers | None = None,
) -> tuple[NDArray[np.uint32], NDArray[Any]]:
    """Positions and differences from decoded planes, whose sizes are within `sizes_allowed`.

    Args:
        workers: that share the blocks; without them the caller unpacks all.
    Raises:
        ChunkInvalid: planes that contradict each other, the count or the frame.
    """
    columns = 2 if item_bytes == 1 else 4
    marks = planes["restart"].view("<u4").reshape(-1, columns)
    gaps = planes["gap"]
    check_marks(marks, gaps.size, count)
    positions = np.empty(gaps.size + 1, np.uint32)
    classes = None if item_bytes == 1 else Classes(count, marks, planes)

    def unpack(blocks: tuple[int, int]) -> None:
        if not unpack_gaps(gaps, marks, items, count, positions, *blocks):
            raise ChunkInvalid(
                f"gap plane doesn't lead to {count} of {items} items, or not by restarts"
            )
        if classes is not None:
            classes.unpack(*blocks)

    blocks = marks.shape[0] + 1
    if workers is None or count < _SHARED_COUNT_MIN:
        unpack((0, blocks))
    else:
        shares = min(workers.size, blocks)
        workers.map(unpack, pairwise(blocks * i // shares for i in range(shares + 1)))
    if classes is None:
        return positions[:count], planes["byte"]
    return positions[:count], classes.differences[:count]
