"""Anchors: what other ways to cut items into planes would store, measured beside `dense`."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Section
from plait.codec.dense import split
from plait.codec.planes import pack_plane

# Bits of the exponent and of the mantissa below it; the sign is above both.
FIELDS: Final = {
    "BF16": (8, 7),
    "F16": (5, 10),
    "F32": (8, 23),
    "F8_E4M3": (4, 3),
    "F8_E5M2": (5, 2),
}


def treatments_section(held: dict[str, NDArray[Any]]) -> Section:
    """Stored over raw bytes of the bits of each dtype, under each treatment that applies."""
    return Section(
        "Anchors: other planes",
        "Stored over raw bytes, each plane packed as plait packs its own; no frames, no chunk "
        "headers. Rotated: byte planes of items rotated left by one bit, which is what plait "
        "stores (items of one byte as they are). Not rotated: byte planes of the items. By field: "
        "the exponent as one plane of bytes, the sign and every bit of the mantissa as a plane of "
        "bits. Zigzag: 0, -1, 1, -2, ... as 0, 1, 2, 3, ..., then byte planes.",
        ["dtype", "rotated", "not rotated", "by field", "zigzag"],
        [[dtype, *_row(dtype, bits)] for dtype, bits in held.items()],
    )


def _row(dtype: str, bits: NDArray[Any]) -> Iterator[str]:
    for planes in (
        split([bits], rotate=True),
        split([bits], rotate=False) if bits.itemsize > 1 else None,
        _fields(bits, *FIELDS[dtype]) if dtype in FIELDS else None,
        split([_zigzag(bits)], rotate=False) if dtype not in FIELDS else None,
    ):
        yield "" if planes is None else f"{_stored(planes) / bits.nbytes:.3f}"


def _stored(planes: Iterable[NDArray[np.uint8]]) -> int:
    return sum(pack_plane("plane", plane).stored_size for plane in planes)


def _fields(bits: NDArray[Any], exponent: int, mantissa: int) -> Iterator[NDArray[np.uint8]]:
    one = bits.dtype.type(1)
    mask = bits.dtype.type((1 << exponent) - 1)
    yield ((bits >> bits.dtype.type(mantissa)) & mask).astype(np.uint8)
    for place in (*range(mantissa), exponent + mantissa):
        yield np.packbits(((bits >> bits.dtype.type(place)) & one).astype(np.uint8))


def _zigzag(bits: NDArray[Any]) -> NDArray[Any]:
    signed = bits.view(f"i{bits.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * bits.itemsize - 1))).view(bits.dtype)
