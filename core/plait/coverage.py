"""Whether strided runs of words overlap.

Only segments that lie among each other are expanded into runs: a segment's own runs don't overlap.
"""

from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

Words = NDArray[np.int64]

_NONE: Final = -1


def word_twice(first: Words, stride: Words, repeats: Words, run_words: Words) -> int | None:
    """A word that occurs in two runs, or None. Takes 16 bytes for each run that is expanded.

    Args:
        first, stride, repeats, run_words: int64, one of each for every segment. The runs of a
            segment don't overlap.
    """
    if not first.size:
        return None
    order = np.argsort(first, kind="stable")
    first, stride, repeats, run_words = (c[order] for c in (first, stride, repeats, run_words))
    end = first + (repeats - 1) * stride + run_words
    reached = np.maximum.accumulate(end)
    # A group begins where all segments before have ended.
    begins = np.flatnonzero(np.append(True, first[1:] >= reached[:-1]))
    sizes = np.diff(np.append(begins, first.size))
    among = np.repeat(sizes > 1, sizes)
    firsts = np.empty(int(repeats[among].sum()), np.int64)
    ends = np.empty_like(firsts)
    _expand(first[among], stride[among], repeats[among], run_words[among], firsts, ends)
    # Sorted apart, they pair up exactly if no run begins before the one in front has ended.
    firsts.sort()
    ends.sort()
    found = int(_first_overlap(firsts, ends))
    return None if found == _NONE else found


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _expand(first: Any, stride: Any, repeats: Any, run_words: Any, firsts: Any, ends: Any) -> None:
    row = 0
    for segment in range(first.size):
        for number in range(repeats[segment]):
            firsts[row] = first[segment] + number * stride[segment]
            ends[row] = firsts[row] + run_words[segment]
            row += 1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _first_overlap(firsts: Any, ends: Any) -> Any:
    for i in range(1, firsts.size):
        if firsts[i] < ends[i - 1]:
            return firsts[i]
    return _NONE
