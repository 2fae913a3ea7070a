"""Dense planes: one byte of every item each, the least significant first.

`wide` holds differences of 4- and 8-byte items like this, nearly all of them zero. `dense` holds
items themselves, rotated left by one bit first where they have several bytes: that puts the sign
behind the mantissa and makes the exponent of BF16 and F32 one plane, the one worth compressing.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from plait.codec.planes import Bytes
from plait.weights import UNSIGNED

# Items go from memory to all planes, or back, in blocks that stay in the first cache between them.
_BLOCK: Final = 1 << 12


def plane_names(item_bytes: int) -> tuple[str, ...]:
    return tuple(f"byte{number}" for number in range(item_bytes))


def split(parts: Sequence[NDArray[Any]], *, rotate: bool) -> list[Bytes]:
    """Byte planes of unsigned items [n]: as many arrays of n bytes as an item has.

    Args:
        parts: the items, in contiguous arrays that follow each other.
        rotate: items of several bytes left by one bit first.
    """
    width = parts[0].itemsize
    planes = [np.empty(sum(part.size for part in parts), np.uint8) for _ in range(width)]
    offset = 0
    for part in parts:
        end = offset + part.size
        if width == 1:
            planes[0][offset:end] = part
        else:
            _split(part, int(rotate), tuple(plane[offset:end] for plane in planes))
        offset = end
    return planes


def join(planes: Sequence[Bytes], items: int, *, rotated: bool) -> NDArray[Any]:
    """Items from their byte planes of `items` bytes each: what `split` took apart."""
    if len(planes) == 1:
        return planes[0]
    joined = np.empty(items, UNSIGNED[len(planes)])
    # One pass over all planes of a block, so that the items are written to memory once.
    _join(tuple(planes), int(rotated), joined)
    return joined


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _split(items: Any, left: Any, planes: Any) -> None:
    width = len(planes)
    turned = np.empty(_BLOCK, items.dtype)
    for first in range(0, items.size, _BLOCK):
        part = items[first : first + _BLOCK]
        count = part.size
        if left:
            for i in range(count):
                turned[i] = (part[i] << 1) | (part[i] >> (8 * width - 1))
        else:
            turned[:count] = part
        for k in range(width):
            plane = planes[k][first : first + _BLOCK]
            for i in range(count):
                plane[i] = turned[i] >> (8 * k)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _join(planes: Any, right: Any, joined: Any) -> None:
    width = len(planes)
    nothing = joined.dtype.type(0)
    for first in range(0, joined.size, _BLOCK):
        part = joined[first : first + _BLOCK]
        count = part.size
        part[:] = nothing
        for k in range(width):
            plane = planes[k][first : first + _BLOCK]
            for i in range(count):
                part[i] |= np.uint64(plane[i]) << np.uint64(8 * k)
        if right:
            for i in range(count):
                part[i] = (part[i] >> 1) | (part[i] << (8 * width - 1))
