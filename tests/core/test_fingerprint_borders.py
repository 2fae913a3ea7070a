"""The compiled run against Python's integers, where the high bits of a lane's keys change."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from plait.fingerprint import (
    SEED_0,
    SEED_1,
    ZERO,
    Fingerprint,
    fingerprint_run,
    fingerprint_strided,
)
from plait.layout import words_per_item
from plait.weights import UNSIGNED
from tests.core.strategies import seeds

MASK = (1 << 64) - 1
WORDS_LIMIT = 1 << 48

# Of each lane: its seed, its shifts and its factors (docs/format.md).
LANES = (
    (int(SEED_0), (33, 33, 33), (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)),
    (int(SEED_1), (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)),
)


def plain(bits: NDArray[Any], first_word: int) -> Fingerprint:
    """The definition, word for word in Python's integers."""
    raw, size = bits.tobytes(), min(bits.itemsize, 2)
    words = [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]
    sums = []
    for seed, shifts, factors in LANES:
        total = 0
        for word, value in enumerate(words, first_word):
            key = (((word << 16) | value) + seed) & MASK
            for shift, factor in zip(shifts, (*factors, 1), strict=True):
                key = ((key ^ (key >> shift)) * factor) & MASK
            total += key
        sums.append(total & MASK)
    return Fingerprint(*sums)


def border(near: int, lane: int) -> tuple[int, int]:
    """The first word from `near` on whose value decides the key's high bits, and from which on."""
    seed, shifts, _ = LANES[lane]
    block = 1 << shifts[0]
    edge = ((near << 16) + seed + block) // block * block - seed
    return edge >> 16, edge & 0xFFFF


NEAR = (0, 1 << 14, 1 << 17, (1 << 31) - 9, 1 << 32, (1 << 33) + 5, (1 << 47) + 1)
BORDERS = [(lane, *border(near, lane)) for near in NEAR for lane in (0, 1)]

# Where a lane's 64-bit key itself begins again at zero: the word lies within the limit.
WRAPS = [
    (lane, ((1 << 64) - seed) >> 16, -seed & 0xFFFF) for lane, (seed, _, _) in enumerate(LANES)
]


@pytest.mark.parametrize(("lane", "word", "value"), [*BORDERS, *WRAPS])
def test_a_border_word_is_summed_by_its_own_value(lane: int, word: int, value: int) -> None:
    seed, shifts, _ = LANES[lane]
    keys = [(word << 16) + seed + v for v in (0, value - 1, value, 0xFFFF)]
    assert [(key >> shifts[0]) - (keys[0] >> shifts[0]) for key in keys] == [0, 0, 1, 1]
    around = np.full(41, 0x1234, np.uint16)
    for decisive in (0, value - 1, value, value + 1, 0xFFFF):
        around[20] = decisive
        assert fingerprint_run(around, word - 20) == plain(around, word - 20)


@pytest.mark.parametrize("size", UNSIGNED)
@pytest.mark.parametrize(("lane", "word", "value"), [BORDERS[0], BORDERS[1], *WRAPS])
def test_runs_may_start_and_end_anywhere_around_a_border(
    lane: int, word: int, value: int, size: int
) -> None:
    random = np.random.default_rng(lane + value)
    for start, items in itertools.product((-35, -2, -1, 0, 1, 2), (0, 1, 2, 3, 35, 36, 70)):
        bits = random.integers(0, 256, items * size, np.uint8).view(UNSIGNED[size])
        assert fingerprint_run(bits, word + start) == plain(bits, word + start)


@pytest.mark.parametrize("items", range(71))
def test_runs_of_every_short_size_follow_the_definition(items: int) -> None:
    for size, dtype in UNSIGNED.items():
        bits = np.random.default_rng(items).integers(0, 256, items * size, np.uint8).view(dtype)
        last = WORDS_LIMIT - items * words_per_item(size)
        for word in (0, 7, (1 << 14) - 3, (1 << 17) - 3, (1 << 33) - 3, last):
            assert fingerprint_run(bits, word) == plain(bits, word)


@pytest.mark.parametrize("first_word", [0, 12345, (1 << 33) - 70_000, WORDS_LIMIT - 150_001])
def test_a_run_over_many_borders_follows_the_definition(first_word: int) -> None:
    bits = np.random.default_rng(5).integers(0, 1 << 16, 150_001, np.uint16)
    assert fingerprint_run(bits, first_word) == plain(bits, first_word)


def test_unaligned_bits_are_read_as_they_lie() -> None:
    raw = np.random.default_rng(6).integers(0, 256, 4003, np.uint8)
    for start in (1, 2, 3):
        bits = raw[start : start + 4000].view(np.uint16)
        assert fingerprint_run(bits, 77) == plain(bits, 77)


@given(
    st.sampled_from(list(UNSIGNED)),
    seeds,
    st.one_of(st.sampled_from([*BORDERS, *WRAPS]).map(lambda b: b[1]), st.integers(0, 1 << 47)),
    st.integers(0, 90),
    st.integers(0, 90),
    st.sampled_from([(0, 1), (255, 256), (0, 256)]),
)
def test_any_run_near_any_border_follows_the_definition(
    size: int, seed: int, word: int, before: int, items: int, values: tuple[int, int]
) -> None:
    random = np.random.default_rng(seed)
    bits = random.integers(*values, items * size, np.uint8).view(UNSIGNED[size])
    first = max(0, word - before)
    assert fingerprint_run(bits, first) == plain(bits, first)


@given(
    st.sampled_from(list(UNSIGNED)),
    seeds,
    st.one_of(st.sampled_from([*BORDERS, *WRAPS]).map(lambda b: b[1]), st.integers(0, 1 << 47)),
    st.integers(1, 4) | st.integers(15, 70),
    st.integers(0, 5),
    st.integers(0, 40) | st.just(1 << 14),
)
def test_strided_runs_follow_the_definition(
    size: int, seed: int, word: int, run: int, repeats: int, apart: int
) -> None:
    stride = run * words_per_item(size) + apart
    first = max(0, word - 2 * stride)
    bits = np.random.default_rng(seed).integers(0, 256, repeats * run * size, np.uint8)
    items = bits.view(UNSIGNED[size])
    runs = [plain(part, first + n * stride) for n, part in enumerate(items.reshape(repeats, run))]
    assert fingerprint_strided(items, first, run=run, stride=stride) == sum(runs, ZERO)
