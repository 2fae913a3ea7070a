"""What every store promises, asked of each of them."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from plait.canonical import digest_of
from plait.errors import FormatError, ObjectMissing, SizeMismatch, UsageError
from plait.store import Store, object_key

MIB = 1 << 20


def listed(store: Store, prefix: str = "") -> dict[str, int]:
    return {each.key: each.size for each in store.list(prefix)}


@pytest.mark.parametrize("size", [0, 1, 5 * MIB])
def test_an_object_comes_back_byte_for_byte(store: Store, size: int) -> None:
    data = os.urandom(size)
    key = object_key(digest_of(data))
    store.put(key, data)
    assert store.get(key) == data
    assert store.size(key) == size
    assert listed(store) == {key: size}


def test_any_buffer_can_be_written(store: Store) -> None:
    store.put("a", memoryview(bytearray(b"weights")))  # type: ignore[arg-type]
    assert store.get("a") == b"weights"


def test_a_range_is_exactly_the_bytes_asked_for(store: Store) -> None:
    data = bytes(range(256)) * 40
    store.put("ranges/a", data)
    for start, length in [(0, 1), (0, len(data)), (255, 2), (len(data) - 1, 1), (5000, 3000)]:
        assert store.get_range("ranges/a", start, length) == data[start : start + length]


def test_an_empty_range_is_empty_wherever_the_object_reaches(store: Store) -> None:
    store.put("a", b"four")
    store.put("empty", b"")
    assert store.get_range("a", 0, 0) == b""
    assert store.get_range("a", 4, 0) == b""
    assert store.get_range("empty", 0, 0) == b""


@pytest.mark.parametrize(
    ("start", "length"), [(0, 5), (3, 2), (4, 1), (5, 0), (900, 1), (0, 1 << 40)]
)
def test_a_range_beyond_the_end_is_refused_not_shortened(
    store: Store, start: int, length: int
) -> None:
    store.put("a", b"four")
    with pytest.raises(SizeMismatch):
        store.get_range("a", start, length)


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, -1)])
def test_a_negative_range_is_refused(store: Store, start: int, length: int) -> None:
    store.put("a", b"four")
    with pytest.raises(UsageError):
        store.get_range("a", start, length)


def test_a_key_that_is_not_there_is_missing(store: Store) -> None:
    store.put("there/a", b"a")
    for key in ["gone", "there", "there/b", "there/a/below"]:
        with pytest.raises(ObjectMissing):
            store.get(key)
        with pytest.raises(ObjectMissing):
            store.size(key)
        for length in (0, 1):
            with pytest.raises(ObjectMissing):
                store.get_range(key, 0, length)


def test_an_empty_store_lists_nothing(store: Store) -> None:
    assert listed(store) == {}
    assert listed(store, "sha256/") == {}


def test_a_listing_has_every_object_below_any_prefix(store: Store) -> None:
    held = {"a": 1, "sha256/ab/one": 2, "sha256/ab/two": 3, "sha256/abc": 4, "sha256/cd/e/f": 5}
    for key, size in held.items():
        store.put(key, b"x" * size)
    assert listed(store) == held
    for prefix in ["a", "sha256/", "sha256", "sha256/ab", "sha256/ab/", "sha256/ab/t", "none/"]:
        expected = {key: size for key, size in held.items() if key.startswith(prefix)}
        assert listed(store, prefix) == expected, prefix


def test_a_listing_says_when_an_object_was_written(store: Store) -> None:
    store.put("a", b"a")
    (found,) = store.list()
    # Wide enough for any clock here, narrow enough for a wrong unit.
    assert abs(found.modified - time.time()) < 86400


def test_deleting_twice_is_no_error(store: Store) -> None:
    store.put("sha256/ab/a", b"a")
    store.put("sha256/ab/b", b"b")
    store.delete("sha256/ab/a")
    store.delete("sha256/ab/a")
    store.delete("never/was")
    assert listed(store) == {"sha256/ab/b": 1}


def test_writing_a_key_again_replaces_the_object_whole(store: Store) -> None:
    store.put("a", b"a longer object")
    store.put("a", b"short")
    assert store.get("a") == b"short"
    assert store.size("a") == 5


def test_sixteen_threads_write_at_once_and_nothing_is_lost(store: Store) -> None:
    objects = [os.urandom(10_000 + number) for number in range(64)]
    keys = [object_key(digest_of(data)) for data in objects]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(store.put, keys, objects))
        assert list(pool.map(store.get, keys)) == objects
    assert listed(store) == {k: len(data) for k, data in zip(keys, objects, strict=True)}


def test_no_reader_sees_part_of_an_object(store: Store) -> None:
    """A writer replaces one object again and again; readers find a whole one every time."""
    versions = [bytes([number]) * (2 * MIB + number) for number in range(8)]
    sizes = {len(data) for data in versions}
    writing = threading.Event()
    store.put("a", versions[0])

    def read() -> int:
        reads = 0
        while not writing.is_set() or not reads:
            assert store.get("a") in versions
            assert set(listed(store).values()) <= sizes
            reads += 1
        return reads

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            for data in versions:
                store.put("a", data)
        finally:
            writing.set()
        assert all(reader.result() for reader in readers)


BAD_KEYS = [
    "",
    ".",
    "..",
    "../escape",
    "a/../../escape",
    "/absolute",
    "a//b",
    "a/",
    ".tmp-0123",
    "a/.hidden",
    "-a",
    "a\\b",
    "a\x00b",
    "a\nb",
    "a b",
    "ä",
    "s3://other/bucket",
    "x" * 256,
    "/".join(["x"] * 400),
]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_key_that_could_leave_the_root_is_refused_by_every_method(store: Store, key: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.put(key, b"x"),
        lambda: store.get(key),
        lambda: store.get_range(key, 0, 1),
        lambda: store.size(key),
        lambda: store.delete(key),
    ]
    for call in calls:
        with pytest.raises(FormatError, match="store key"):
            call()
    assert listed(store) == {}


def test_the_probe_passes_and_leaves_nothing(store: Store) -> None:
    store.check()
    assert listed(store) == {}


def test_a_sweep_takes_no_object(store: Store) -> None:
    store.put("a", b"a")
    assert store.sweep_temporary(0) == 0
    assert listed(store) == {"a": 1}


def test_a_store_shows_its_url(store: Store) -> None:
    assert store.url in repr(store)
