"""The fingerprint: a sum over words that any order, shard or update arrives at."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import DocumentInvalid, UsageError
from plait.fingerprint import (
    ZERO,
    Fingerprint,
    fingerprint_at,
    fingerprint_run,
    fingerprint_strided,
)
from plait.layout import Layout, TensorSpec, words_per_item
from plait.weights import ArrayWeights, fingerprint_weights
from tests.core import reference
from tests.core.strategies import seeds

item_sizes = st.sampled_from([1, 2, 4, 8])
first_words = st.sampled_from([0, 1, 77, (1 << 32) - 3, (1 << 47) + 5])


@given(item_sizes, seeds, first_words, st.integers(0, 200))
def test_runs_and_scattered_items_follow_the_formula(
    item_bytes: int, seed: int, first_word: int, items: int
) -> None:
    random = np.random.default_rng(seed)
    bits = random.integers(0, 256, items * item_bytes, dtype=np.uint8).view(f"u{item_bytes}")
    expected = Fingerprint.parse(reference.fingerprint(bits, first_word))
    assert fingerprint_run(bits, first_word) == expected
    words = first_word + words_per_item(item_bytes) * np.arange(items, dtype=np.int64)
    assert fingerprint_at(words, bits) == expected
    order = random.permutation(items)
    assert fingerprint_at(words[order], bits[order]) == expected


@given(item_sizes, seeds, st.integers(0, 100))
def test_parts_add_up(item_bytes: int, seed: int, cut: int) -> None:
    random = np.random.default_rng(seed)
    bits = random.integers(0, 256, 100 * item_bytes, dtype=np.uint8).view(f"u{item_bytes}")
    rest = cut * words_per_item(item_bytes)
    parts = fingerprint_run(bits[:cut], 0) + fingerprint_run(bits[cut:], rest)
    assert parts == fingerprint_run(bits, 0)


def test_a_full_pass_is_the_same_on_any_number_of_threads() -> None:
    tensors = [TensorSpec("a", "U8", ((1 << 22) + 5,)), TensorSpec("b", "F32", ((1 << 21) + 3,))]
    layout = Layout.of(tensors)
    random = np.random.default_rng(0)
    bits = {t.name: random.integers(0, 256, t.nbytes, np.uint8) for t in tensors}
    weights = ArrayWeights(layout, {"a": bits["a"], "b": bits["b"].view(np.uint32)})
    expected = reference.add_fingerprints(
        reference.fingerprint(bits["a"]),
        reference.fingerprint(bits["b"].view(np.uint32), tensors[0].words),
    )
    for threads in (None, 1, 2, 5):
        assert str(fingerprint_weights(weights, threads=threads)) == expected


def test_every_single_bit_and_every_place_counts() -> None:
    seen = {str(fingerprint_run(np.array([1 << bit], np.uint16), 0)) for bit in range(16)}
    seen |= {str(fingerprint_run(np.array([1], np.uint16), word)) for word in range(1, 1000)}
    assert len(seen) == 16 + 999


def test_every_scattered_item_has_its_word() -> None:
    with pytest.raises(UsageError, match="expected one for each"):
        fingerprint_at(np.arange(3), np.zeros(2, np.uint32))


@pytest.mark.parametrize(
    "bits",
    [
        np.full(4, -1, np.int8),
        np.full(4, -1, np.int16),
        np.zeros(4, np.float32),
        np.zeros(4, ">u2"),
        np.zeros((2, 2), np.uint16),
    ],
    ids=lambda bits: f"{bits.dtype.str}{bits.shape}",
)
def test_bits_with_a_sign_or_another_order_have_no_fingerprint(bits: Any) -> None:
    words = np.zeros(bits.shape, np.int64)
    calls: list[Callable[[], Fingerprint]] = [
        lambda: fingerprint_run(bits, 0),
        lambda: fingerprint_strided(bits, 0, run=2, stride=5),
        lambda: fingerprint_at(words, bits),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="unsigned items"):
            call()


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_run_with_holes_in_memory_is_refused(size: int) -> None:
    bits = np.arange(8, dtype=f"<u{size}")[::2]
    with pytest.raises(UsageError, match="contiguous"):
        fingerprint_run(bits, 0)
    words = np.arange(4, dtype=np.int64) * words_per_item(size)
    assert fingerprint_at(words, bits) == fingerprint_run(bits.copy(), 0)


def test_words_are_int64() -> None:
    with pytest.raises(UsageError, match="int64"):
        fingerprint_at(np.zeros(2, np.int32), np.zeros(2, np.uint16))


def test_strided_items_are_whole_runs() -> None:
    for run in (0, 2, 4):
        with pytest.raises(UsageError, match="whole runs"):
            fingerprint_strided(np.zeros(3, np.uint16), 0, run=run, stride=9)


def test_eight_bit_items_are_zero_extended_words() -> None:
    narrow = np.array([0, 1, 255], np.uint8)
    assert fingerprint_run(narrow, 5) == fingerprint_run(narrow.astype(np.uint16), 5)


def test_wide_items_are_little_endian_words() -> None:
    wide = np.array([0x0004000300020001], np.uint64)
    assert fingerprint_run(wide, 8) == fingerprint_run(np.array([1, 2, 3, 4], np.uint16), 8)


lanes = st.integers(0, (1 << 64) - 1)
fingerprints = st.builds(Fingerprint, lanes, lanes)


@given(fingerprints, fingerprints, fingerprints)
def test_fingerprints_are_a_group(a: Fingerprint, b: Fingerprint, c: Fingerprint) -> None:
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + ZERO == a
    assert a - a == a + -a == ZERO
    assert Fingerprint.parse(str(a)) == a


@pytest.mark.parametrize(
    "text", ["", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "0" * 32 + "\n", "٠" * 32, 0, None]
)
def test_what_isn_t_32_lower_case_hex_digits_is_refused(text: object) -> None:
    with pytest.raises(DocumentInvalid):
        Fingerprint.parse(text)
