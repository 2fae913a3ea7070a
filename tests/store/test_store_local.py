"""The local store: what a kill, a full disk and a umask leave in its folder."""

import errno
import mmap
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from plait.errors import NoSpace, ObjectMissing, StoreError, StoreUnavailable
from plait.store import LocalStore

KEY = "sha256/ab/object"
DATA = bytes(range(256)) * 4096

# Runs a put up to the named point, says so, and waits there to be killed.
_WRITER = """
import os, pathlib, sys, time
from plait.store import LocalStore

root, key, point = sys.argv[1:]
store = LocalStore(root)
write, fsync, replace = os.write, os.fsync, pathlib.Path.replace

def stop():
    print("there", flush=True)
    time.sleep(3600)

def is_file(handle):
    return os.path.isfile(f"/proc/self/fd/{handle}")

def slow_write(handle, data):
    if handle > 2 and point == "half written":
        write(handle, bytes(data[: len(data) // 2]))
        stop()
    return write(handle, data)

def slow_fsync(handle):
    if point == ("before the fsync" if is_file(handle) else "before the folder's fsync"):
        if is_file(handle) or (pathlib.Path(root) / key).exists():
            stop()
    fsync(handle)

def slow_replace(self, target):
    if point == "before the rename":
        stop()
    return replace(self, target)

os.write, os.fsync, pathlib.Path.replace = slow_write, slow_fsync, slow_replace
store.put(key, bytes(range(256)) * 4096)
"""


def killed_at(root: Path, point: str) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(root), KEY, point], stdout=subprocess.PIPE
    )
    with writer:
        assert writer.stdout is not None
        try:
            assert writer.stdout.readline() == b"there\n"
        finally:
            writer.send_signal(signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL


def files_in(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


@pytest.mark.parametrize("point", ["half written", "before the fsync", "before the rename"])
def test_a_writer_killed_before_the_rename_leaves_no_object(tmp_path: Path, point: str) -> None:
    killed_at(tmp_path, point)
    store = LocalStore(tmp_path)
    assert len(files_in(tmp_path)) == 1, "the kill came after the temporary file was made"
    assert list(store.list()) == []
    with pytest.raises(ObjectMissing):
        store.get(KEY)

    assert store.sweep_temporary(older_than_seconds=3600) == 0, "it may still be written to"
    assert store.sweep_temporary(older_than_seconds=0) == 1
    assert files_in(tmp_path) == []
    store.put(KEY, DATA)
    assert store.get(KEY) == DATA


def test_a_writer_killed_after_the_rename_leaves_the_whole_object(tmp_path: Path) -> None:
    killed_at(tmp_path, "before the folder's fsync")
    store = LocalStore(tmp_path)
    assert store.get(KEY) == DATA
    assert [each.key for each in store.list()] == [KEY]
    assert store.sweep_temporary(older_than_seconds=0) == 0


def test_bytes_are_on_disk_before_the_name_and_the_name_before_put_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing here can cut the power, so the order of the calls stands for it."""
    store = LocalStore(tmp_path)
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(handle: int) -> None:
        target = Path(f"/proc/self/fd/{handle}").readlink()
        events.append("fsync " + (str(target.relative_to(tmp_path)) if target.is_dir() else "file"))
        fsync(handle)

    def noted_replace(self: Path, target: Path) -> Path:
        events.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    store.put(KEY, DATA)
    assert events == ["fsync .", "fsync sha256", "fsync file", "rename", "fsync sha256/ab"]
    events.clear()
    store.put("sha256/ab/another", DATA)
    assert events == ["fsync file", "rename", "fsync sha256/ab"]


def test_a_folder_that_another_process_made_is_made_durable_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LocalStore(tmp_path).put(KEY, DATA)
    synced: list[Path] = []
    fsync = os.fsync

    def noted_fsync(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink())
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    LocalStore(tmp_path).put("sha256/ab/another", DATA)
    assert {tmp_path, tmp_path / "sha256", tmp_path / "sha256/ab"} <= set(synced)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_halfway_is_a_typed_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = LocalStore(tmp_path)
    store.put("sha256/ab/earlier", b"earlier")
    write = os.write
    calls = 0

    def filling(handle: int, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(number, os.strerror(number))
        return write(handle, bytes(data[: len(data) // 2]))

    monkeypatch.setattr(os, "write", filling)
    with pytest.raises(NoSpace, match="sha256/ab/object"):
        store.put(KEY, DATA)
    monkeypatch.undo()
    assert [path.name for path in files_in(tmp_path)] == ["earlier"]
    store.put(KEY, DATA)
    assert store.get(KEY) == DATA


def test_a_real_limit_on_file_size_is_no_space_too(tmp_path: Path) -> None:
    program = """
import resource, sys
from plait.errors import NoSpace
from plait.store import LocalStore
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
store = LocalStore(sys.argv[1])
store.put("small", b"x" * 100_000)
try:
    store.put("large", b"x" * 100_001)
except NoSpace as error:
    print(error.code)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "no_space\n"
    assert [path.name for path in files_in(tmp_path)] == ["small"]


def test_a_full_disk_at_the_fsync_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filesystems that allot late, NFS among them, say only then that they are full."""
    store = LocalStore(tmp_path)
    store.put("sha256/ab/earlier", b"earlier")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoSpace):
        store.put(KEY, DATA)
    assert [path.name for path in files_in(tmp_path)] == ["earlier"]


@pytest.mark.parametrize(
    ("umask", "file_mode", "folder_mode"), [(0o027, 0o640, 0o750), (0o002, 0o664, 0o775)]
)
def test_modes_follow_the_umask_so_that_a_group_can_share_a_store(
    tmp_path: Path, umask: int, file_mode: int, folder_mode: int
) -> None:
    program = """
import os, sys
from plait.store import LocalStore
os.umask(int(sys.argv[2]))
LocalStore(sys.argv[1]).put("sha256/ab/object", b"weights")
"""
    root = tmp_path / "shared"
    subprocess.run([sys.executable, "-c", program, str(root), str(umask)], check=True)
    for path in [root, *root.rglob("*")]:
        expected = folder_mode if path.is_dir() else file_mode
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_a_reader_of_a_replaced_object_sees_the_old_one_to_its_end(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put(KEY, DATA)
    with (
        store.path_of(KEY).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        store.put(KEY, b"")
        assert mapped[:] == DATA
    assert store.get(KEY) == b""


def test_a_store_whose_folder_is_gone_is_unavailable_and_is_not_made_again(tmp_path: Path) -> None:
    """The folder of a disk that isn't mounted must not look like an empty store."""
    root = tmp_path / "mount"
    store = LocalStore(root)
    store.put(KEY, DATA)
    root.rename(tmp_path / "elsewhere")
    for call in (
        lambda: store.put(KEY, DATA),
        lambda: store.get(KEY),
        lambda: store.size(KEY),
        lambda: store.delete(KEY),
        lambda: list(store.list()),
        lambda: store.sweep_temporary(0),
        store.check,
    ):
        with pytest.raises(StoreUnavailable, match="is gone"):
            call()
    assert not root.exists()


def test_folders_that_somebody_tidied_away_are_made_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put(KEY, DATA)
    store.delete(KEY)
    (tmp_path / "sha256/ab").rmdir()
    (tmp_path / "sha256").rmdir()
    store.put(KEY, DATA)
    assert store.get(KEY) == DATA


def test_a_writer_whose_temporary_file_was_swept_may_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    fsync = os.fsync

    def swept_meanwhile(handle: int) -> None:
        fsync(handle)
        store.sweep_temporary(older_than_seconds=0)

    monkeypatch.setattr(os, "fsync", swept_meanwhile)
    with pytest.raises(StoreUnavailable) as caught:
        store.put(KEY, DATA)
    assert caught.value.retryable
    monkeypatch.undo()
    store.put(KEY, DATA)
    assert store.get(KEY) == DATA


def test_a_sweep_goes_by_age(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put(KEY, DATA)
    folder = tmp_path / "sha256/ab"
    for name, age in ((".tmp-old", 7200), (".tmp-new", 60)):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (time.time() - age,) * 2)
    assert store.sweep_temporary(older_than_seconds=3600) == 1
    assert {path.name for path in files_in(tmp_path)} == {".tmp-new", "object"}


def test_an_input_output_error_may_pass_and_a_file_in_the_way_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    (tmp_path / "taken").write_bytes(b"")
    with pytest.raises(StoreError) as blocked:
        store.put("taken/below", DATA)
    assert not blocked.value.retryable

    def failing(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StoreUnavailable) as passing:
        store.put("a", DATA)
    assert passing.value.retryable


def test_a_folder_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="make the folder"):
        LocalStore(tmp_path / "file" / "store")
