"""The bucket store against an S3 server over HTTP, behind a proxy that does it harm."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from plait.errors import ObjectMissing, SizeMismatch, StoreError, StoreUnavailable
from plait.store import FsspecStore

from .faulty_proxy import Fault, Proxy
from .s3_server import make_bucket, options_for

pytestmark = pytest.mark.s3

DATA = bytes(range(256)) * 4096


def no_pause(seconds: float) -> None:
    """Retries at once: what is asked for is that they happen, not how long they take."""


def opened(url: str, port: int, **more: Any) -> FsspecStore:
    return FsspecStore(url, options_for(port, **more), pause=no_pause)


CALLS: dict[str, Callable[[FsspecStore], object]] = {
    "put": lambda store: store.put("new", DATA),
    "get": lambda store: store.get("held"),
    "get_range": lambda store: store.get_range("held", 5, 10),
    "size": lambda store: store.size("held"),
    "list": lambda store: [each.key for each in store.list()],
    "delete": lambda store: store.delete("held"),
    "check": lambda store: store.check(),
}


def test_an_object_written_elsewhere_is_seen_by_a_reader_that_has_listed(
    s3_url: str, s3_port: int
) -> None:
    reader, writer = opened(s3_url, s3_port), opened(s3_url, s3_port)
    assert list(reader.list()) == []
    with pytest.raises(ObjectMissing):
        reader.get("sha256/ab/new")
    writer.put("sha256/ab/new", DATA)
    assert [each.key for each in reader.list()] == ["sha256/ab/new"]
    assert reader.size("sha256/ab/new") == len(DATA)
    assert reader.get("sha256/ab/new") == DATA

    writer.put("sha256/ab/new", DATA * 2)
    assert reader.get("sha256/ab/new") == DATA * 2
    writer.delete("sha256/ab/new")
    assert list(reader.list()) == []
    with pytest.raises(ObjectMissing):
        reader.size("sha256/ab/new")


def test_an_object_of_another_process_is_seen(s3_url: str, s3_port: int) -> None:
    reader = opened(s3_url, s3_port)
    assert list(reader.list()) == []
    program = f"""
from plait.store import FsspecStore
FsspecStore({s3_url!r}, {options_for(s3_port)!r}).put("a", b"from elsewhere")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert reader.get("a") == b"from elsewhere"


def test_two_prefixes_of_a_bucket_are_two_stores(s3_port: int) -> None:
    bucket = make_bucket(s3_port)
    whole = opened(f"s3://{bucket}", s3_port)
    assert list(whole.list()) == []
    one, other = opened(f"s3://{bucket}/one/", s3_port), opened(f"s3://{bucket}/other", s3_port)
    one.put("a", b"1")
    other.put("a", b"2")
    assert (one.get("a"), other.get("a")) == (b"1", b"2")
    assert [each.key for each in one.list()] == ["a"]
    assert {each.key for each in whole.list()} == {"one/a", "other/a"}


def test_a_whole_object_is_one_request_and_a_write_is_two(proxy: Proxy, s3_url: str) -> None:
    store = opened(s3_url, proxy.port)
    store.put("a", DATA)
    assert [method for method, _ in proxy.requests] == ["PUT", "HEAD"]
    proxy.requests.clear()
    store.get("a")
    assert [method for method, _ in proxy.requests] == ["GET"]


@pytest.mark.parametrize("fault", ["slow_down", "reset"])
@pytest.mark.parametrize("call", CALLS)
def test_every_call_outlasts_throttling_and_resets(
    proxy: Proxy, s3_port: int, s3_url: str, call: str, fault: Fault
) -> None:
    opened(s3_url, s3_port).put("held", DATA)
    expected = {"get": DATA, "get_range": DATA[5:15], "size": len(DATA), "list": ["held"]}
    proxy.faults = [fault] * 3
    assert CALLS[call](opened(s3_url, proxy.port)) == expected.get(call)
    assert proxy.faults == []
    if call == "put":
        assert opened(s3_url, s3_port).get("new") == DATA


@pytest.mark.parametrize("fault", ["slow_down", "reset"])
@pytest.mark.parametrize("call", CALLS)
def test_retries_are_bounded_and_then_the_store_is_unavailable(
    proxy: Proxy, s3_url: str, call: str, fault: Fault
) -> None:
    proxy.faults = [fault] * 1000
    store = FsspecStore(s3_url, options_for(proxy.port), attempts=4, pause=no_pause)
    with pytest.raises(StoreUnavailable, match="4 times") as caught:
        CALLS[call](store)
    assert caught.value.retryable
    # A connection that is cut is made once more by the HTTP client itself; a check deletes too.
    assert 4 <= len(proxy.requests) <= 16


def test_pauses_grow_with_full_jitter_up_to_a_limit(proxy: Proxy, s3_url: str) -> None:
    pauses: list[float] = []
    proxy.faults = ["slow_down"] * 1000
    store = FsspecStore(s3_url, options_for(proxy.port), attempts=12, pause=pauses.append)
    with pytest.raises(StoreUnavailable):
        store.get("a")
    limits = [min(0.1 * 2**number, 5.0) for number in range(11)]
    assert len(pauses) == 11
    assert all(0 <= pause <= limit for pause, limit in zip(pauses, limits, strict=True))
    assert len(set(pauses)) == 11


def test_a_server_that_is_not_there_is_unavailable(s3_url: str) -> None:
    with pytest.raises(StoreUnavailable):
        opened(s3_url, 9).get("a")


def test_a_write_whose_answer_was_lost_is_written(proxy: Proxy, s3_url: str) -> None:
    store = opened(s3_url, proxy.port)
    proxy.faults, proxy.only = ["lose_answer"], frozenset({"PUT"})
    store.put("a", DATA)
    assert store.get("a") == DATA


def test_a_download_that_is_cut_is_never_taken_for_the_object(proxy: Proxy, s3_url: str) -> None:
    store = opened(s3_url, proxy.port)
    store.put("a", DATA)
    proxy.faults, proxy.only = ["cut_download"] * 2, frozenset({"GET"})
    assert store.get("a") == DATA
    proxy.faults = ["cut_download"] * 2
    assert store.get_range("a", 0, 100_000) == DATA[:100_000]
    proxy.faults = ["cut_download"] * 100
    with pytest.raises(StoreUnavailable):
        store.get("a")


def test_an_upload_that_the_store_kept_only_in_part_is_refused_and_removed(
    proxy: Proxy, s3_url: str
) -> None:
    store = opened(s3_url, proxy.port)
    proxy.faults, proxy.only = ["cut_upload"], frozenset({"PUT"})
    with pytest.raises(SizeMismatch, match=f"{len(DATA) - 1} of the {len(DATA)}"):
        store.put("a", DATA)
    with pytest.raises(ObjectMissing):
        store.get("a")


def test_eight_uploads_at_once_survive_random_faults(
    proxy: Proxy, s3_port: int, s3_url: str
) -> None:
    dice = random.Random(8)
    kinds: list[Fault] = ["slow_down", "reset", "lose_answer"]
    proxy.faults = [dice.choice(kinds) if dice.random() < 0.3 else None for _ in range(60)]
    store = FsspecStore(s3_url, options_for(proxy.port), attempts=12, pause=no_pause)
    objects = {f"sha256/ab/{number}": os.urandom(100_000) for number in range(8)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store.put, objects.keys(), objects.values()))
    clean = opened(s3_url, s3_port)
    assert {key: clean.get(key) for key in objects} == objects


def write_credentials(path: Path, key: str) -> None:
    path.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")


@pytest.mark.parametrize("call", CALLS)
def test_credentials_that_expired_are_read_afresh(
    proxy: Proxy,
    s3_port: int,
    s3_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    opened(s3_url, s3_port).put("held", DATA)
    credentials = tmp_path / "credentials"
    write_credentials(credentials, "FIRST")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    store = opened(s3_url, proxy.port, key=None, secret=None)
    assert store.get("held") == DATA

    write_credentials(credentials, "SECOND")
    proxy.expired_key = "FIRST"
    CALLS[call](store)


def test_threads_that_meet_expired_credentials_together_all_succeed(
    proxy: Proxy, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And options from the environment are read again, too."""
    text = '{{"endpoint_url": "http://127.0.0.1:{}", "key": "{}", "secret": "s"}}'
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("PLAIT_STORE_OPTIONS", text.format(proxy.port, "FIRST"))
    store = FsspecStore(s3_url, pause=no_pause)
    store.put("held", DATA)
    monkeypatch.setenv("PLAIT_STORE_OPTIONS", text.format(proxy.port, "SECOND"))
    proxy.expired_key = "FIRST"
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(store.get, ["held"] * 64)) == {DATA}


def test_credentials_that_stay_expired_fail_after_one_renewal(proxy: Proxy, s3_url: str) -> None:
    proxy.expired_key = "test"
    store = opened(s3_url, proxy.port)
    with pytest.raises(StoreError, match="credentials") as caught:
        store.get("a")
    assert not caught.value.retryable
    assert len(proxy.requests) == 2


@pytest.mark.parametrize("url", ["s3://no-such-bucket", "s3://no-such-bucket/prefix"])
@pytest.mark.parametrize("call", ["put", "get", "get_range", "list", "delete", "check"])
def test_a_bucket_that_does_not_exist_is_not_an_empty_store(
    s3_port: int, url: str, call: str
) -> None:
    with pytest.raises(StoreError, match="no such bucket"):
        CALLS[call](opened(url, s3_port))


def test_an_empty_object_that_shows_a_folder_is_no_object(s3_url: str, s3_port: int) -> None:
    """Consoles make one, with a key that ends in a slash."""
    store = opened(s3_url, s3_port)
    store.put("folder/a", b"a")
    bucket_path = s3_url.removeprefix("s3://")
    store._filesystem.call_s3(
        "put_object",
        Bucket=bucket_path.partition("/")[0],
        Key=bucket_path.partition("/")[2] + "/folder/",
        Body=b"",
    )
    assert [each.key for each in store.list()] == ["folder/a"]
