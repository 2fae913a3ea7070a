"""A store in a folder: a local disk, or a filesystem that several machines mount."""

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from plait.errors import NoSpace, ObjectMissing, PlaitError, StoreError, StoreUnavailable
from plait.store.base import Store, StoredObject, check_range, range_beyond
from plait.store.keys import check_key

_TEMPORARY: Final = ".tmp-"  # no key has a part that starts with a dot

# RLIMIT_FSIZE and a filesystem's largest file answer EFBIG: no room for this object, either way.
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PASSING: Final = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOTCONN,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)


class LocalStore(Store):
    """Objects as files below a folder.

    A write goes to a temporary file in the target folder, is fsynced, renamed to its key, and the
    folders are fsynced: after a power cut an object is there whole or not at all. Modes follow the
    umask. Many processes, of any machine that mounts the folder, may use it at once.
    """

    def __init__(self, root: Path | str) -> None:
        """Open the folder, which is made if it isn't there.

        Raises:
            StoreError: the folder can't be made.
        """
        self.root = Path(root).resolve()
        self.url = self.root.as_uri()
        # Folders that this process has fsynced into their parents. Another process may have made
        # one and died before its own fsync, so that a folder exists says nothing about durability.
        self._durable: set[Path] = {self.root}
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            _fsync_folder(self.root.parent)
        except OSError as error:
            raise self._meaning("make the folder", error) from error

    def path_of(self, key: str) -> Path:
        """The file that holds, or would hold, an object; not to be written through."""
        return self.root / check_key(key)

    def put(self, key: str, data: bytes) -> None:
        path = self.path_of(key)
        with self._translated(f"write {key}"):
            temporary, handle = self._open_temporary(path.parent)
            try:
                _write_durably(handle, data)
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            _fsync_folder(path.parent)

    def get(self, key: str) -> bytes:
        path = self.path_of(key)
        with self._translated(f"read {key}", missing=key):
            return path.read_bytes()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        path = self.path_of(key)
        with self._translated(f"read {key}", missing=key), path.open("rb") as file:
            # Asked before reading: `length` may come from outside and be anything.
            if start + length > os.fstat(file.fileno()).st_size:
                raise range_beyond(self.url, key, start, length)
            file.seek(start)
            data = file.read(length)
        if len(data) != length:
            raise range_beyond(self.url, key, start, length)
        return data

    def size(self, key: str) -> int:
        path = self.path_of(key)
        with self._translated(f"look at {key}", missing=key):
            found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ObjectMissing(f"{key} is not in {self.url}")
        return found.st_size

    def delete(self, key: str) -> None:
        path = self.path_of(key)
        with self._translated(f"delete {key}"):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                self._require_root()

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        folder = prefix.rpartition("/")[0]
        start = self.path_of(folder) if folder else self.root
        with self._translated("list"):
            self._require_root()
            for path, found in _files(start):
                key = path.relative_to(self.root).as_posix()
                if not path.name.startswith(_TEMPORARY) and key.startswith(prefix):
                    yield StoredObject(key, found.st_size, found.st_mtime)

    def sweep_temporary(self, older_than_seconds: float) -> int:
        horizon = time.time() - older_than_seconds
        removed = 0
        with self._translated("sweep temporary files"):
            self._require_root()
            for path, found in _files(self.root):
                if path.name.startswith(_TEMPORARY) and found.st_mtime <= horizon:
                    path.unlink(missing_ok=True)
                    removed += 1
        return removed

    def _open_temporary(self, folder: Path) -> tuple[Path, int]:
        """A new empty file in the folder, and its descriptor; makes the folder durably first."""
        temporary = folder / f"{_TEMPORARY}{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        if folder not in self._durable:
            self._make_folder(folder)
        try:
            return temporary, os.open(temporary, flags, 0o666)
        except FileNotFoundError:
            # Somebody tidied empty folders away.
            self._make_folder(folder)
            return temporary, os.open(temporary, flags, 0o666)

    def _make_folder(self, folder: Path) -> None:
        # Never the root itself: where a disk isn't mounted, the mount point must not be filled.
        self._require_root()
        below_root = [folder, *folder.parents]
        below_root = below_root[: below_root.index(self.root)]
        for each in reversed(below_root):
            each.mkdir(exist_ok=True)
            _fsync_folder(each.parent)
        self._durable.update(below_root)

    def _require_root(self) -> None:
        if not self.root.is_dir():
            raise StoreUnavailable(
                f"the store's folder {self.root} is gone", remedy="is its disk mounted?"
            )

    @contextmanager
    def _translated(self, action: str, *, missing: str = "") -> Iterator[None]:
        """Turn the operating system's errors into the store's; `missing` names the key read."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            self._require_root()
            if missing:
                raise ObjectMissing(f"{missing} is not in {self.url}") from error
            # A writer's temporary file was swept from under it: it may try again. A file where a
            # folder should be, or the reverse, stays.
            failure = StoreUnavailable if isinstance(error, FileNotFoundError) else StoreError
            raise failure(f"{self.url}: cannot {action}: {error}") from error
        except OSError as error:
            raise self._meaning(action, error) from error

    def _meaning(self, action: str, error: OSError) -> PlaitError:
        message = f"{self.url}: cannot {action}: {error}"
        if error.errno in _NO_SPACE:
            return NoSpace(message, remedy="free space, or raise the quota or file size limit")
        if error.errno in _PASSING:
            return StoreUnavailable(message)
        return StoreError(message)


def _write_durably(handle: int, data: bytes) -> None:
    """Write all bytes, fsync and close."""
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(handle, left) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every file below a folder with its status; what vanishes meanwhile is left out."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
            continue
        try:
            found = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        yield Path(entry.path), found
