"""Compiled loops of the reconstruction for weights in CPU memory; torch does the same elsewhere.

On the caller's thread: torch's own threads, woken for runs that fit a cache, cost more than the
work. Nothing is checked here: arrays are contiguous and equally long. Each loop is written as the
compiler turns it into vector instructions (max() it doesn't).
"""

from typing import Any, Final

import numpy as np
from numba import njit

_SIGN_OFF: Final = np.uint32(0x7FFFFFFF)
_HALF: Final = np.uint32(0x7FFF)
_SIXTEEN: Final = np.uint32(16)
_ONE: Final = np.uint32(1)

# The exponents of numbers that aren't finite.
_FLOAT32_INFINITE: Final = np.uint32(0x7F800000)
_BFLOAT16_INFINITE: Final = np.uint32(0x7F80)

# Flags looked at together: few are set.
_TOGETHER: Final = 64


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def recover(
    weights: Any, first: Any, second: Any,
    per_root: Any, eps: Any, step_size: Any, per_decay: Any, out: Any,
) -> Any:  # fmt: skip
    """`inversion.Inversion.recover`, float32 throughout.

    Returns:
        The bits of the largest update's size before its step size; a NaN's are larger than any.
    """
    bits = out.view(np.uint32)
    for i in range(out.size):
        out[i] = first[i] / (np.sqrt(second[i]) * per_root + eps)
    largest = np.uint32(0)
    for i in range(out.size):
        size = bits[i] & _SIGN_OFF
        largest = size if size > largest else largest
    for i in range(out.size):
        out[i] = (weights[i] + step_size * out[i]) * per_decay
    return largest


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def near_bf16_boundary(weights: Any, slope: Any, offset: Any, room: Any) -> Any:
    """`boundary_log.near_boundary` for weights published as bfloat16.

    Args:
        room: float32 [2, at least as many], overwritten.
    Returns:
        int64 [found], positions.
    """
    items = weights.size
    low, high = room[0], room[1]
    low_bits, high_bits = low.view(np.uint32), high.view(np.uint32)
    for i in range(items):
        error = abs(weights[i]) * slope + offset
        low[i] = weights[i] - error
        high[i] = weights[i] + error
    flags = np.empty(items, np.uint8)
    count = 0
    for i in range(items):
        a, b = low_bits[i], high_bits[i]
        # To the nearest bfloat16, ties to even; of a NaN, anything.
        a_rounded = (a + _HALF + ((a >> _SIXTEEN) & _ONE)) >> _SIXTEEN
        b_rounded = (b + _HALF + ((b >> _SIXTEEN) & _ONE)) >> _SIXTEEN
        flags[i] = (
            np.uint32(a_rounded != b_rounded)
            | np.uint32((a_rounded & _BFLOAT16_INFINITE) == _BFLOAT16_INFINITE)
            | np.uint32((a & _FLOAT32_INFINITE) == _FLOAT32_INFINITE)
        )
        count += flags[i]
    found = np.empty(count, np.int64)
    count = 0
    for start in range(0, items, _TOGETHER):
        stop = min(start + _TOGETHER, items)
        some = np.uint8(0)
        for i in range(start, stop):
            some |= flags[i]
        if some:
            for i in range(start, stop):
                if flags[i]:
                    found[count] = i
                    count += 1
    return found
