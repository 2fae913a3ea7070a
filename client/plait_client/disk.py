"""Durable local files: atomic writes, folder syncs, and what the system's errors mean."""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from plait.errors import NoSpace, StoreError

TEMPORARY_PREFIX: Final = ".tmp-"  # of files that a killed process may leave behind
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def disk_errors(action: str) -> Iterator[None]:
    """Turn the operating system's errors into plait's.

    Raises:
        NoSpace: the disk or a quota is full.
        StoreError: any other refusal, with the system's words.
    """
    try:
        yield
    except OSError as error:
        message = f"cannot {action}: {error}"
        if error.errno in _NO_SPACE:
            raise NoSpace(message, remedy="free space there and run the command again") from error
        raise StoreError(message) from error


def open_regular(path: Path) -> BinaryIO | None:
    """Open a file for reading; None: a folder, a FIFO or a device has its name. Raises OSError."""
    # Without O_NONBLOCK a FIFO would block for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    return None


def read_regular(path: Path) -> bytes | None:
    """A file's bytes; None: a folder, a FIFO or a device has its name. Raises OSError."""
    file = open_regular(path)
    if file is None:
        return None
    with file:
        return file.read()


def remove_any(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it, if it is there. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a whole file durably: a temporary beside it, fsync, rename, folder fsync.

    The mode follows the umask. Raises OSError.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a folder's entries durable."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Make a file's content durable, also what was written through a shared map."""
    _sync(path, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
