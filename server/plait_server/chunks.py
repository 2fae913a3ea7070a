"""Chunks: objects first, their rows after, and nothing believed that wasn't read.

All of it blocks; routes call it in threads.
"""

import hashlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal

from plait.errors import CorruptionError, DigestMismatch, NotFound, ObjectMissing, SizeMismatch
from plait.limits import CHUNK_BYTES_MAX, MIB
from plait.store import Store, digest_of_key, object_key
from plait_server import failpoints
from plait_server.catalog import Catalog, StoredChunk

_log: Final = logging.getLogger("plait.server")

# Sizes are asked for side by side: one round trip to a bucket each.
_STATS_AT_ONCE: Final = 16
_SLICE_BYTES: Final = 8 * MIB  # held at once while an object is read back: ordinary ones are one

Taken = Literal["new", "kept", "mended"]


class Chunks:
    """The door for chunks."""

    def __init__(self, catalog: Catalog, store: Store) -> None:
        self._catalog = catalog
        self._store = store
        self._stats = ThreadPoolExecutor(_STATS_AT_ONCE, "plait-stat")

    def close(self) -> None:
        self._stats.shutdown(cancel_futures=True)

    def find(self, digest: str) -> StoredChunk:
        """Raises NotFound."""
        found = self._catalog.chunks([digest]).get(digest)
        if found is None:
            raise NotFound(f"no chunk {digest}", digest=digest)
        return found

    def missing(self, digests: Sequence[str]) -> list[str]:
        """Those that must be uploaded: unknown, gone, of another size, or found damaged."""
        known = self._catalog.chunks(set(digests))
        sound = {digest for digest, chunk in known.items() if not chunk.damaged}
        present = [known[digest] for digest in dict.fromkeys(digests) if digest in sound]
        whole = {
            chunk.digest
            for chunk, held in zip(present, self._stats.map(self._has_size, present), strict=True)
            if held
        }
        return [digest for digest in dict.fromkeys(digests) if digest not in whole]

    def put(self, digest: str, data: bytes) -> tuple[StoredChunk, Taken]:
        """Takes in a chunk's bytes.

        A chunk that is there already is read back before it is kept: a damaged one is mended by
        the new bytes, under a new key.

        Raises:
            DigestMismatch: other bytes than the name says; nothing is stored.
            StoreUnavailable, NoSpace: nothing is recorded.
        """
        found = "sha256:" + hashlib.sha256(data).hexdigest()
        if found != digest:
            raise DigestMismatch(
                f"chunk {digest} arrived with the digest {found}",
                remedy="send it again; it was damaged on the way",
                expected=digest, found=found,
            )  # fmt: skip
        recorded = self._catalog.chunks([digest]).get(digest)
        if recorded is not None and self._is_whole(recorded):
            return self._sound(recorded), "kept"
        failpoints.reach("chunk.received")
        chunk = StoredChunk(digest, len(data), object_key(digest))
        self._store.put(chunk.key, data)
        failpoints.reach("chunk.stored")
        kept = self._record(chunk, instead_of=recorded)
        failpoints.reach("chunk.recorded")
        return kept, "new" if recorded is None else "mended"

    def adopt(self, digest: str, key: str, size: int) -> tuple[StoredChunk, Taken]:
        """Records an object that an agent wrote into the store itself, once it has been read.

        Raises:
            ObjectMissing, SizeMismatch, DigestMismatch: it isn't what the agent says.
            FormatError: a key that no chunk has.
        """
        if digest_of_key(key) != digest:
            raise DigestMismatch(f"key {key!r} is not one of chunk {digest}")
        chunk = StoredChunk(digest, size, key)
        recorded = self._catalog.chunks([digest]).get(digest)
        if recorded is not None and self._is_whole(recorded):
            return self._sound(recorded), "kept"
        self._require_whole(chunk)
        return self._record(chunk, instead_of=recorded), "new" if recorded is None else "mended"

    def read(self, chunk: StoredChunk, start: int, length: int) -> bytes:
        """A range of a chunk's bytes.

        Raises:
            ObjectMissing, SizeMismatch: the store has lost it, or a part of it.
        """
        return self._store.get_range(chunk.key, start, length)

    def mark_damaged(self, chunk: StoredChunk) -> None:
        """It was read whole and isn't what its name says: the next publisher is to send it."""
        _log.error("chunk %s is damaged in the store, object %s", chunk.digest, chunk.key)
        self._catalog.mark_chunk(chunk, damaged=True)

    def _sound(self, chunk: StoredChunk) -> StoredChunk:
        if chunk.damaged:  # the store gave other bytes once, but doesn't any more
            self._catalog.mark_chunk(chunk, damaged=False)
        return chunk

    def _record(self, chunk: StoredChunk, *, instead_of: StoredChunk | None) -> StoredChunk:
        kept = self._catalog.record_chunk(chunk, instead_of=instead_of)
        if kept.key != chunk.key and kept.digest == chunk.digest:
            # Somebody was faster. Nobody knows this key, so nobody can miss its object.
            self._store.delete(chunk.key)
        return kept

    def _has_size(self, chunk: StoredChunk) -> bool:
        try:
            return self._store.size(chunk.key) == chunk.size
        except ObjectMissing:
            return False

    def _is_whole(self, chunk: StoredChunk) -> bool:
        try:
            self._require_whole(chunk)
        except (CorruptionError, ObjectMissing):
            return False
        return True

    def _require_whole(self, chunk: StoredChunk) -> None:
        size = self._store.size(chunk.key)
        if size != chunk.size or size > CHUNK_BYTES_MAX:
            raise SizeMismatch(
                f"object {chunk.key!r} has {size} bytes, expected {chunk.size}",
                expected=chunk.size, found=size,
            )  # fmt: skip
        hashed = hashlib.sha256()
        for start in range(0, size, _SLICE_BYTES):
            length = min(size - start, _SLICE_BYTES)
            hashed.update(self._store.get_range(chunk.key, start, length))
        found = "sha256:" + hashed.hexdigest()
        if found != chunk.digest:
            raise DigestMismatch(
                f"object {chunk.key!r} has the digest {found}, expected {chunk.digest}",
                expected=chunk.digest, found=found,
            )  # fmt: skip


class Reading:
    """One sending of a chunk, slice by slice, which notices if what is stored isn't the chunk."""

    def __init__(self, chunks: Chunks, chunk: StoredChunk) -> None:
        self._chunks = chunks
        self._chunk = chunk
        self._hashed = hashlib.sha256()
        self._bytes = 0

    def read(self, start: int, length: int) -> bytes:
        """The next slice. Whoever reads from the first byte to the last has it all compared.

        Raises:
            ObjectMissing, SizeMismatch: the store has lost it, or a part of it.
        """
        data = self._chunks.read(self._chunk, start, length)
        if start == self._bytes:
            self._hashed.update(data)
            self._bytes += length
            if self._bytes == self._chunk.size and not self._is_itself():
                # The reader finds it out as well. This is for whoever can mend it.
                self._chunks.mark_damaged(self._chunk)
        return data

    def _is_itself(self) -> bool:
        return "sha256:" + self._hashed.hexdigest() == self._chunk.digest
