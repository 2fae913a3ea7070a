"""Dense planes: one byte of every item each, the least significant first.

`wide` holds differences of 4- and 8-byte items like this, nearly all of them zero. `dense` holds
items themselves, rotated left by one bit first where they have several bytes: that puts the sign
behind the mantissa and makes the exponent of BF16 and F32 one plane, the one worth compressing.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.codec.planes import Bytes
from plait.weights import UNSIGNED


def plane_names(item_bytes: int) -> tuple[str, ...]:
    return tuple(f"byte{number}" for number in range(item_bytes))


def split(items: NDArray[Any]) -> list[Bytes]:
    """Byte planes of unsigned items [n]: as many arrays of n bytes as an item has."""
    rows = items.view(np.uint8).reshape(items.size, items.itemsize)
    return [np.ascontiguousarray(rows[:, number]) for number in range(items.itemsize)]


def join(planes: Sequence[Bytes], items: int) -> NDArray[Any]:
    """Items from their byte planes of `items` bytes each."""
    rows = np.empty((items, len(planes)), np.uint8)
    for number, plane in enumerate(planes):
        rows[:, number] = plane
    return rows.reshape(-1).view(UNSIGNED[len(planes)])


def rotate(items: NDArray[Any]) -> NDArray[Any]:
    """Items of several bytes rotated left by one bit; bytes as they are."""
    if items.itemsize == 1:
        return items
    one, rest = (items.dtype.type(bits) for bits in (1, 8 * items.itemsize - 1))
    rotated: NDArray[Any] = (items << one) | (items >> rest)
    return rotated


def rotate_back(items: NDArray[Any]) -> NDArray[Any]:
    """Reverses `rotate`."""
    if items.itemsize == 1:
        return items
    one, rest = (items.dtype.type(bits) for bits in (1, 8 * items.itemsize - 1))
    rotated: NDArray[Any] = (items >> one) | (items << rest)
    return rotated
