"""The fingerprint: identity of decoded weights, independent of chunking, codec, sharding and order.

Two 64-bit lanes. For the word numbered w with value v, `key = (w << 16) | v`; lane 0 adds
`fmix64(key + SEED_0)` (MurmurHash3's finaliser), lane 1 adds `mix13(key + SEED_1)` (splitmix64's
finaliser, Stafford's variant 13), all modulo 2^64. A sum: parts add up in any order, and an update
costs O(changed). It detects accidents, not attackers (docs/format.md).
"""

import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from plait.errors import DocumentInvalid, UsageError
from plait.layout import words_per_item

_MASK: Final = (1 << 64) - 1
_HEX: Final = re.compile(r"[0-9a-f]{32}")

# A sign would be extended into the key, and give another fingerprint.
_ITEMS: Final = frozenset(np.dtype(f"<u{size}") for size in (1, 2, 4, 8))

# Added to the key, so that the two lanes of one word have nothing in common.
SEED_0: Final = np.uint64(0x9E3779B97F4A7C15)
SEED_1: Final = np.uint64(0xC2B2AE3D27D4EB4F)

# Of a finaliser: how far to shift, what to multiply by, and so on by turns.
FMIX64: Final = tuple(map(np.uint64, (33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33)))
MIX13: Final = tuple(map(np.uint64, (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)))

# Full passes run in slices, so that Ctrl-C and other threads get a turn.
_SLICE_WORDS: Final = 1 << 24

# Finding the stretches of a run takes as long as summing so many of its words one by one.
_SHORT_RUN: Final = 64


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Two lanes, each an integer modulo 2^64. Adds and subtracts lane by lane."""

    lane0: int = 0
    lane1: int = 0

    def __add__(self, other: "Fingerprint") -> "Fingerprint":
        return Fingerprint((self.lane0 + other.lane0) & _MASK, (self.lane1 + other.lane1) & _MASK)

    def __sub__(self, other: "Fingerprint") -> "Fingerprint":
        return Fingerprint((self.lane0 - other.lane0) & _MASK, (self.lane1 - other.lane1) & _MASK)

    def __neg__(self) -> "Fingerprint":
        return ZERO - self

    def __str__(self) -> str:
        return f"{self.lane0:016x}{self.lane1:016x}"

    @classmethod
    def parse(cls, text: object) -> "Fingerprint":
        """From 32 lower-case hex digits, lane 0 first.

        Raises:
            DocumentInvalid: anything else.
        """
        if not isinstance(text, str) or not _HEX.fullmatch(text):
            raise DocumentInvalid(f"a fingerprint is 32 lower-case hex digits: {str(text)[:80]!r}")
        return cls(int(text[:16], 16), int(text[16:], 16))


ZERO: Final = Fingerprint()


def fingerprint_run(bits: NDArray[Any], first_word: int) -> Fingerprint:
    """Fingerprint of consecutive items whose first word is number `first_word`.

    Args:
        bits: 1-d contiguous uint8, uint16, uint32 or uint64.
        first_word: canonical index of the first item's first word.
    Raises:
        UsageError: bits of another kind.
    """
    total = ZERO
    words = _as_words(bits)
    for start in range(0, words.size, _SLICE_WORDS):
        part = words[start : start + _SLICE_WORDS]
        total += Fingerprint(*map(int, _sum_run(part, first_word + start)))
    return total


def fingerprint_strided(
    bits: NDArray[Any], first_word: int, *, run: int, stride: int
) -> Fingerprint:
    """Fingerprint of runs of `run` consecutive items each, their starts `stride` words apart.

    Args:
        bits: 1-d contiguous uint8, uint16, uint32 or uint64: the runs, one behind the other.
        first_word: canonical index of the first run's first word.
    Raises:
        UsageError: they aren't whole runs, or bits of another kind.
    """
    if run < 1 or bits.size % run:
        raise UsageError(f"{bits.size} items; expected whole runs of {run}")
    words = _as_words(bits)
    run_words = run * words_per_item(bits.itemsize)
    return Fingerprint(*map(int, _sum_runs(words, first_word, run_words, stride)))


def fingerprint_at(words: NDArray[np.int64], bits: NDArray[Any]) -> Fingerprint:
    """Fingerprint of scattered items: `words[i]` is the first word of item `bits[i]`.

    Args:
        words: 1-d int64.
        bits: 1-d uint8, uint16, uint32 or uint64 of the same length.
    Raises:
        UsageError: they aren't equally long, or of another kind.
    """
    if words.shape != bits.shape or words.dtype != np.int64:
        raise UsageError(
            f"{words.dtype}{words.shape} words for {bits.shape} items; expected one for each, int64"
        )
    width = words_per_item(bits.itemsize)
    values = _as_words(np.ascontiguousarray(bits))
    return Fingerprint(*map(int, _sum_scattered(words, values, width)))


def _as_words(bits: NDArray[Any]) -> NDArray[Any]:
    """Items as their words: uint8 stays (zero-extended in the kernel), wider ones become uint16."""
    if bits.dtype not in _ITEMS or bits.ndim != 1 or not bits.flags.c_contiguous:
        raise UsageError(
            f"a fingerprint of {bits.dtype.str}{list(bits.shape)}; expected 1-d contiguous "
            "unsigned items, little-endian"
        )
    return bits if bits.itemsize <= 2 else bits.view("<u2")


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def fmix64(key: Any) -> Any:
    """MurmurHash3's finaliser of a uint64, compiled: lane 0."""
    return _fmix64_rest(key ^ (key >> FMIX64[0]))


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _fmix64_rest(key: Any) -> Any:
    """`fmix64` after its first xorshift."""
    key *= FMIX64[1]
    key ^= key >> FMIX64[2]
    key *= FMIX64[3]
    return key ^ (key >> FMIX64[4])


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def mix13(key: Any) -> Any:
    """splitmix64's finaliser of a uint64, compiled: lane 1."""
    return _mix13_rest(key ^ (key >> MIX13[0]))


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _mix13_rest(key: Any) -> Any:
    """`mix13` after its first xorshift."""
    key *= MIX13[1]
    key ^= key >> MIX13[2]
    key *= MIX13[3]
    return key ^ (key >> MIX13[4])


# A full pass spends nearly all its time in two loops over one run. The first step of each finaliser
# xors a key with its own high bits: those above bit 33 (lane 0) or 30 (lane 1), which only change
# every 2^17 or 2^14 words. So a run is cut into stretches over which they are constants, and two
# shifts of six go. A word whose value alone decides whether they change is summed by itself.


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _sum_run(values: Any, first_word: Any) -> Any:
    lane0 = np.uint64(0)
    lane1 = np.uint64(0)
    done = 0
    while done < values.size:
        key = (np.uint64(first_word) + np.uint64(done)) << np.uint64(16)
        key0 = key + SEED_0
        key1 = key + SEED_1
        steady = min(_steady_words(key0, FMIX64[0]), _steady_words(key1, MIX13[0]))
        if steady == 0:
            lane0 += fmix64(key0 + np.uint64(values[done]))
            lane1 += mix13(key1 + np.uint64(values[done]))
            done += 1
        else:
            stretch = values[done : done + steady]
            sums = _sum_stretch(stretch, key0, key0 >> FMIX64[0], key1 >> MIX13[0])
            lane0 += sums[0]
            lane1 += sums[1]
            done += stretch.size
    return lane0, lane1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _steady_words(key: Any, shift: Any) -> Any:
    """How many words, from that of `key` on, share `key >> shift`, whatever their values."""
    left = (~key & ((np.uint64(1) << shift) - np.uint64(1))) + np.uint64(1)
    return np.int64(left >> np.uint64(16))


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _sum_stretch(values: Any, key0: Any, high0: Any, high1: Any) -> Any:
    """Sums of both lanes where each lane's first xorshift is an xor with `high0` or `high1`.

    It is written for LLVM to vectorise: one running key for both lanes, no index but the loop's own
    (another may be negative, which costs a gather), and the finalisers' rest in line.
    """
    lane0 = np.uint64(0)
    lane1 = np.uint64(0)
    for i in range(values.size):
        a = key0 + np.uint64(values[i])
        b = a + (SEED_1 - SEED_0)
        key0 += np.uint64(1 << 16)
        lane0 += _fmix64_rest(a ^ high0)
        lane1 += _mix13_rest(b ^ high1)
    return lane0, lane1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _sum_runs(values: Any, first_word: Any, run_words: Any, stride: Any) -> Any:
    lane0 = np.uint64(0)
    lane1 = np.uint64(0)
    for number in range(values.size // run_words):
        part = values[number * run_words : (number + 1) * run_words]
        word = np.uint64(first_word + number * stride)
        if run_words < _SHORT_RUN:
            for i in range(run_words):
                key = ((word + np.uint64(i)) << np.uint64(16)) | np.uint64(part[i])
                lane0 += fmix64(key + SEED_0)
                lane1 += mix13(key + SEED_1)
        else:
            sums = _sum_run(part, word)
            lane0 += sums[0]
            lane1 += sums[1]
    return lane0, lane1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _sum_scattered(words: Any, values: Any, width: Any) -> Any:
    lane0 = np.uint64(0)
    lane1 = np.uint64(0)
    for i in range(words.size):
        for k in range(width):
            word = np.uint64(words[i]) + np.uint64(k)
            key = (word << np.uint64(16)) | np.uint64(values[i * width + k])
            lane0 += fmix64(key + SEED_0)
            lane1 += mix13(key + SEED_1)
    return lane0, lane1
