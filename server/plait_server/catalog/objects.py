"""Documents and chunks in SQL."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from sqlalchemy import Connection, select, update

from plait.errors import NotFound
from plait_server.catalog.base import ManifestChunks, StoredChunk, StoredDocument
from plait_server.catalog.refusals import require_chunks
from plait_server.catalog.rows import insert_or_keep
from plait_server.catalog.tables import chunks, documents, manifest_chunks, manifests
from plait_server.clock import now

_BATCH: Final = 500  # parameters in one statement: SQLite's oldest limit is 999


def put_documents(connection: Connection, found: Sequence[StoredDocument]) -> int:
    """Keeps documents that are there already; returns how many are new."""
    return sum(
        insert_or_keep(
            connection,
            documents,
            [
                {
                    "digest": document.digest,
                    "format": document.format,
                    "data": document.data,
                    "size": len(document.data),
                    "created_at": now(),
                }
            ],
        )
        for document in found
    )


def document(connection: Connection, digest: str) -> StoredDocument:
    query = select(documents.c.format, documents.c.data).where(documents.c.digest == digest)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFound(f"no document {digest}", digest=digest)
    return StoredDocument(digest, row.format, row.data)


def ready_chunks(connection: Connection, digests: Collection[str]) -> dict[str, StoredChunk]:
    return {chunk.digest: chunk for _, chunk in _ready(connection, digests)}


def chunk_ids(connection: Connection, digests: Collection[str]) -> dict[str, int]:
    """Row numbers of chunks, which stay as they are until the transaction ends.

    Raises:
        ChunkMissing: names those that aren't there.
    """
    found = {chunk.digest: number for number, chunk in _ready(connection, digests, lock=True)}
    require_chunks(set(digests) - set(found))
    return found


def record_chunk(
    connection: Connection, chunk: StoredChunk, instead_of: StoredChunk | None
) -> StoredChunk:
    row = {"size": chunk.size, "storage_key": chunk.key, "damaged": 0}
    mended = 0
    if instead_of is not None:
        damaged = update(chunks).where(chunks.c.storage_key == instead_of.key)
        mended = connection.execute(damaged.values(**row)).rowcount
    if not mended:
        new = row | {"digest": chunk.digest, "state": "ready", "created_at": now()}
        insert_or_keep(connection, chunks, [new])
    return ready_chunks(connection, [chunk.digest])[chunk.digest]


def mark_chunk(connection: Connection, chunk: StoredChunk, *, damaged: bool) -> None:
    found = update(chunks).where(chunks.c.storage_key == chunk.key)
    connection.execute(found.values(damaged=int(damaged)))


def chunks_of(connection: Connection, wanted: Collection[str]) -> Mapping[str, ManifestChunks]:
    found: dict[str, ManifestChunks] = {}
    for batch in _batches(wanted):
        cuts = select(manifests.c.digest, manifests.c.cut_digest)
        for digest, cut in connection.execute(cuts.where(manifests.c.digest.in_(batch))):
            found[digest] = ManifestChunks(cut, [], [])
        query = (
            select(
                manifest_chunks.c.manifest_digest,
                manifest_chunks.c.role,
                chunks.c.digest,
                chunks.c.size,
                chunks.c.storage_key,
            )
            .join(chunks)
            .where(manifest_chunks.c.manifest_digest.in_(batch))
            .order_by(manifest_chunks.c.manifest_digest, manifest_chunks.c.ordinal)
        )
        for manifest, role, digest, size, key in connection.execute(query):
            entry = found[manifest]
            kept = entry.chunks if role == "chunk" else entry.side_files
            kept.append(StoredChunk(digest, size, key))
    return found


def _ready(
    connection: Connection, digests: Collection[str], *, lock: bool = False
) -> Iterator[tuple[int, StoredChunk]]:
    for batch in _batches(digests):
        query = select(chunks).where(chunks.c.digest.in_(batch), chunks.c.state == "ready")
        for row in connection.execute(query.with_for_update(read=True) if lock else query):
            yield row.id, StoredChunk(row.digest, row.size, row.storage_key, bool(row.damaged))


def _batches(items: Collection[str]) -> Iterator[list[str]]:
    rest = iter(items)
    while batch := list(islice(rest, _BATCH)):
        yield batch
