"""From a URL to a store, and what is refused on the way."""

import sys
from pathlib import Path

import pytest

from plait.errors import NotInstalledError, UsageError
from plait.store import FsspecStore, LocalStore, MemoryStore, open_store


def test_a_path_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (str(tmp_path / "data"), "data", "./data", "data/../data"):
        store = open_store(url)
        assert isinstance(store, LocalStore)
        assert store.root == tmp_path / "data"
    assert store.url == f"file://{tmp_path}/data"


def test_a_local_url_opens_the_store_it_came_from(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "a folder with spaces, 100% ü")
    store.put("a", b"here")
    assert open_store(store.url).get("a") == b"here"


def test_each_store_in_memory_is_its_own() -> None:
    one, other = open_store("memory://"), open_store("memory://")
    assert isinstance(one, MemoryStore)
    one.put("a", b"a")
    assert list(other.list()) == []


@pytest.mark.s3
def test_a_bucket_url_is_a_bucket() -> None:
    store = open_store("s3://bucket/some/prefix/", {"anon": True})
    assert isinstance(store, FsspecStore)
    assert store.url == "s3://bucket/some/prefix"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://example.org/data",
        "ftp://example.org/data",
        "memory://named",
        "file://another-machine/data",
        "file://",
        "s3://",
        "s3:///prefix",
        "s3://key:secret@bucket",
        "s3://bucket?endpoint=http://127.0.0.1",
        "s3://bucket#part",
    ],
)
def test_a_url_of_no_known_kind_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        open_store(url)


def test_a_secret_in_a_url_is_not_repeated_in_the_error() -> None:
    with pytest.raises(UsageError) as caught:
        open_store("s3://key:hidden@bucket")
    assert "hidden" not in str(caught.value)
    assert "PLAIT_STORE_OPTIONS" in str(caught.value)


def test_options_for_a_store_that_takes_none_are_refused(tmp_path: Path) -> None:
    for url in (str(tmp_path), "memory://"):
        with pytest.raises(UsageError, match="only buckets"):
            open_store(url, {"endpoint_url": "http://127.0.0.1"})


@pytest.mark.parametrize("text", ["{", "[]", "null", "3", '"hidden"'])
def test_options_in_the_environment_must_be_a_json_object(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIT_STORE_OPTIONS", text)
    with pytest.raises(UsageError, match="PLAIT_STORE_OPTIONS") as caught:
        open_store("s3://bucket")
    assert "hidden" not in str(caught.value)


def test_options_that_the_filesystem_does_not_take_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="storage options"):
        open_store("s3://bucket", {"max_concurrency": "many"})


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("s3://bucket", "fsspec", "s3"),
        ("gs://bucket", "gcsfs", "gcs"),
        ("az://container", "adlfs", "azure"),
        ("abfs://container", "adlfs", "azure"),
    ],
)
def test_a_missing_library_names_the_extra_to_install(
    url: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NotInstalledError) as caught:
        open_store(url)
    assert caught.value.remedy == f"pip install 'plait[{extra}]'"
