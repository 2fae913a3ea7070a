"""The chunk cache: objects by digest in a folder, verified at every read, bounded in size.

Several processes may share one cache. A file appears under its name whole or not at all, so a
download that stopped is never taken for a finished one.
"""

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from plait.canonical import digest_of, is_digest
from plait.errors import DigestMismatch, UsageError
from plait_client.disk import disk_errors, read_regular, remove_any, write_atomically

_LIMIT_BYTES: Final = 64 << 30
_logger = logging.getLogger(__name__)

# Eviction makes some room ahead, so that it doesn't run at every put.
_KEPT_FRACTION: Final = 0.9


def default_cache_root() -> Path:
    """`$PLAIT_CACHE`, or `plait` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if chosen := os.environ.get("PLAIT_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "plait"


def default_cache_limit() -> int:
    """`$PLAIT_CACHE_BYTES`, or 64 GiB.

    Raises:
        UsageError: the variable isn't a number of bytes.
    """
    chosen = os.environ.get("PLAIT_CACHE_BYTES", "")
    if not chosen:
        return _LIMIT_BYTES
    if not (chosen.isascii() and chosen.isdigit() and len(chosen) <= 18):
        raise UsageError(
            f"PLAIT_CACHE_BYTES is {chosen!r}; expected a number of bytes such as {_LIMIT_BYTES}"
        )
    return int(chosen)


class ChunkCache:
    """Chunks and documents by digest.

    Attributes:
        root: the folder; made at the first put.
        limit_bytes: the least recently used objects go when there are more bytes than this.
            Mirrors, which lie beside the objects, aren't counted.
    """

    def __init__(self, root: Path | None = None, *, limit_bytes: int | None = None) -> None:
        """By default both come from the environment. Raises UsageError: it is off."""
        self.root = root if root is not None else default_cache_root()
        self.limit_bytes = limit_bytes if limit_bytes is not None else default_cache_limit()
        self._objects = self.root / "objects"
        self._lock = threading.Lock()
        self._bytes: int | None = None  # estimate between evictions; None: not counted yet

    def path_of(self, digest: str) -> Path:
        """Where an object lies, or would lie."""
        assert is_digest(digest), digest
        name = digest.removeprefix("sha256:")
        return self._objects / name[:2] / name

    def read(self, digest: str, size: int | None = None) -> bytes | None:
        """An object's bytes, proven by digest; None: not here.

        A bad file is removed and reported to the log; the caller fetches it again.
        """
        path = self.path_of(digest)
        with disk_errors(f"read {path}"):
            try:
                data = read_regular(path)
            except FileNotFoundError:
                return None
            wrong_size = size is not None and data is not None and len(data) != size
            if data is None or wrong_size or digest_of(data) != digest:
                _logger.warning("removed %s from the cache: its bytes are not %s", path, digest)
                remove_any(path)
                return None
            # The order of eviction. Another user's file can be read, but not be touched.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                os.utime(path)
        return data

    def get(self, digest: str, size: int | None = None) -> Path | None:
        """The path of a proven object; None: not here.

        Another process may evict it; whoever needs it longer makes a hard link.
        """
        return None if self.read(digest, size) is None else self.path_of(digest)

    def put(self, digest: str, data: bytes) -> Path:
        """Keep an object, durably.

        Raises:
            DigestMismatch: `data` isn't what `digest` names.
            NoSpace: the disk is full.
        """
        found = digest_of(data)
        if found != digest:
            raise DigestMismatch(f"refused to cache bytes of {found} as {digest}")
        path = self.path_of(digest)
        with disk_errors(f"write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
        self._make_room(len(data))
        return path

    def total_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(size for _, size, _ in self._entries())

    def _make_room(self, added: int) -> None:
        with self._lock:
            self._bytes = self.total_bytes() if self._bytes is None else self._bytes + added
            if self._bytes <= self.limit_bytes:
                return
            with (
                disk_errors(f"remove old objects from {self.root}"),
                self._only_evictor() as alone,
            ):
                self._bytes = self._evict() if alone else None

    @contextlib.contextmanager
    def _only_evictor(self) -> Iterator[bool]:
        with (self.root / "eviction.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _evict(self) -> int:
        """Remove the least recently used objects; returns the bytes that stay."""
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total <= self.limit_bytes * _KEPT_FRACTION:
                break
            path.unlink(missing_ok=True)
            total -= size
        return total

    def _entries(self) -> list[tuple[float, int, Path]]:
        entries: list[tuple[float, int, Path]] = []
        for path in self._objects.glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                entries.append((found.st_mtime, found.st_size, path))
        return entries
