"""The chunk cache: nothing unproven comes out, and two processes don't hurt each other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.canonical import digest_of
from plait.errors import DigestMismatch, NoSpace, UsageError
from plait_client.cache import ChunkCache, default_cache_root


def objects(count: int, size: int) -> dict[str, bytes]:
    data = [number.to_bytes(4, "little") * (size // 4) for number in range(count)]
    return {digest_of(part): part for part in data}


def test_what_was_put_comes_back(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path)
    for digest, data in objects(3, 100).items():
        assert cache.read(digest) is None
        path = cache.put(digest, data)
        assert cache.read(digest, len(data)) == data
        assert cache.get(digest) == path


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d + b"x", lambda d: b"x" + d[1:]])
def test_a_damaged_file_is_removed_and_reported(
    tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(damage)
    cache = ChunkCache(tmp_path)
    (digest, data), *_ = objects(1, 100).items()
    path = cache.put(digest, data)
    path.write_bytes(damage(data))
    assert cache.read(digest, len(data)) is None
    assert not path.exists()
    assert digest in caplog.text


@pytest.mark.parametrize("other", ["pipe", "folder", "link to nothing", "link to a device"])
def test_what_is_no_file_is_removed_and_made_anew(tmp_path: Path, other: str) -> None:
    cache = ChunkCache(tmp_path)
    (digest, data), *_ = objects(1, 100).items()
    path = cache.put(digest, data)
    path.unlink()
    if other == "pipe":
        os.mkfifo(path)
    elif other == "folder":
        (path / "more").mkdir(parents=True)
    else:
        path.symlink_to("nothing" if other == "link to nothing" else "/dev/zero")
    assert cache.read(digest, len(data)) is None
    cache.put(digest, data)
    assert cache.read(digest, len(data)) == data
    assert not path.is_symlink()


def test_bytes_of_another_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DigestMismatch):
        ChunkCache(tmp_path).put(digest_of(b"a"), b"b")


def test_the_least_recently_used_objects_go_first(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, limit_bytes=1000)
    held = objects(10, 100)
    for age, (digest, data) in enumerate(held.items()):
        path = cache.put(digest, data)
        os.utime(path, (1000 + age, 1000 + age))
    first, second, *_ = held
    assert cache.read(first) is not None  # used just now
    cache.put(digest_of(b"more"), b"more")
    assert cache.total_bytes() <= 1000
    assert cache.read(first) is not None
    assert cache.read(second) is None
    assert cache.read(digest_of(b"more")) == b"more"


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = ChunkCache(tmp_path / "cache").put(digest_of(b"a"), b"a")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_two_processes_fill_and_empty_one_cache(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, plait_client.cache as c, plait.canonical as k\n"
        "cache = c.ChunkCache(pathlib.Path(sys.argv[1]), limit_bytes=20_000)\n"
        "for i in range(300):\n"
        "    data = (i % 40).to_bytes(4, 'little') * 250\n"
        "    cache.put(k.digest_of(data), data)\n"
        "    assert cache.read(k.digest_of(data)) in (data, None)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    cache = ChunkCache(tmp_path)
    assert cache.total_bytes() <= 40_000
    assert not list(tmp_path.rglob(".tmp-*"))


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, resource, signal, plait.errors as e\n"
        "import plait_client.cache as c, plait.canonical as k\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "data = bytes(5000)\n"
        "try: c.ChunkCache(pathlib.Path(sys.argv[1])).put(k.digest_of(data), data)\n"
        "except e.NoSpace: sys.exit(7)\n"
    )
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert result.returncode == 7
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    assert NoSpace.exit_code == 1


def test_the_root_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_CACHE", "/somewhere")
    assert default_cache_root() == Path("/somewhere")
    monkeypatch.delenv("PLAIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_root() == Path("/xdg/plait")


def test_the_limit_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PLAIT_CACHE_BYTES", raising=False)
    assert ChunkCache(tmp_path).limit_bytes == 64 << 30
    monkeypatch.setenv("PLAIT_CACHE_BYTES", "4096")
    assert ChunkCache(tmp_path).limit_bytes == 4096
    assert ChunkCache(tmp_path, limit_bytes=7).limit_bytes == 7
    for wrong in ("64G", "-1", "1e9", "9" * 19):
        monkeypatch.setenv("PLAIT_CACHE_BYTES", wrong)
        with pytest.raises(UsageError, match="PLAIT_CACHE_BYTES"):
            ChunkCache(tmp_path)


def test_a_file_of_another_user_is_read_though_it_can_not_be_touched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = ChunkCache(tmp_path)
    cache.put(digest_of(b"shared"), b"shared")

    def not_mine(path: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("plait_client.cache.os.utime", not_mine)
    assert cache.read(digest_of(b"shared")) == b"shared"
