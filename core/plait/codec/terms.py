"""The fingerprint's terms of many items at once, compiled."""

from typing import Any

import numpy as np
from numba import njit

from plait.fingerprint import SEED_0, SEED_1, fmix64, mix13


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def sum_terms(words: Any, values: Any, count: Any, width: Any) -> Any:
    """Fingerprint of `count` items, of which `words` names the first of `width` words."""
    lane0 = np.uint64(0)
    lane1 = np.uint64(0)
    for k in range(width):
        shift = np.uint64(16 * k)
        for i in range(count):
            part = (np.uint64(values[i]) >> shift) & np.uint64(0xFFFF)
            key = ((words[i] + np.uint64(k)) << np.uint64(16)) | part
            lane0 += fmix64(key + SEED_0)
            lane1 += mix13(key + SEED_1)
    return lane0, lane1
