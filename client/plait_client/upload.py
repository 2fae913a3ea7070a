"""The way up: chunks first, then one commit. Used by `plait publish` and by trainers.

Nothing that is uploaded shows anywhere before the commit, so a publish may stop at any moment; what
it already sent isn't sent again, because the registry is asked by digest first.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from plait.codec.chunks import Chunk, pack_chunks
from plait.codec.frames import EncodedFrame
from plait.cut import Cut
from plait.errors import GenerationMoved
from plait.layout import Layout
from plait.limits import MIB
from plait.manifest import ChunkEntry, Manifest
from plait.store import Store, object_key
from plait.version_record import VersionRecord
from plait.wire import CommitRequest, VersionDocument
from plait_client.progress import SILENT, Progress
from plait_client.registry import RegistryClient

# Asked about at once and held in memory at once: small chunks by number, large ones by bytes.
_BATCH_CHUNKS: Final = 64
_BATCH_BYTES: Final = 24 * MIB

_GENERATION_RETRIES: Final = 16


def upload_frames(
    client: RegistryClient,
    frames: Iterable[EncodedFrame],
    *,
    slot: int | Sequence[int] = 0,
    progress: Progress | None = None,
    workers: int = 2,
    store: Store | None = None,
    keep: Callable[[str, bytes], object] | None = None,
) -> list[ChunkEntry]:
    """Pack frames into chunks, and send those that the registry doesn't hold.

    Args:
        frames: encoded, numbers increasing; taken one by one, so a generator may encode them.
        slot: the grain slot that they belong to; or the slot of every frame of the cut.
        progress: told of every sent byte.
        workers: parallel uploads.
        store: written directly, and the registry told; None: through the registry.
        keep: called with every chunk's digest and bytes (a local cache, say).

    Returns:
        The manifest's rows, in the order of the frames within a slot.

    Raises:
        RegistryUnavailable, StoreUnavailable: a chunk couldn't be sent after retries. Nothing is
            committed; a repeat sends only what is missing.
    """
    entries: list[ChunkEntry] = []
    with ThreadPoolExecutor(workers, thread_name_prefix="plait-upload") as pool:
        for batch in _batches(pack_chunks(frames, slot=slot)):
            _send_batch(client, batch, pool, progress or SILENT, store)
            for chunk in batch:
                if keep is not None:
                    keep(chunk.digest, chunk.data)
                entries.append(chunk.entry)
            batch.clear()  # before the next one is made
    return entries


def upload_object(client: RegistryClient, digest: str, data: bytes) -> None:
    """Send one object (a side file) unless the registry holds it."""
    if client.missing_chunks([digest]):
        client.put_chunk(digest, data)


def put_layout(client: RegistryClient, layout: Layout) -> str:
    """Make a layout known to the registry; returns its digest."""
    return client.put_document(layout.serialize())


def put_cut(client: RegistryClient, cut: Cut) -> str:
    """Make a cut known to the registry; returns its digest. Its layout must be known."""
    return client.put_document(cut.serialize())


def commit_version(
    client: RegistryClient,
    *,
    policy: str,
    channel: str,
    record: VersionRecord,
    manifest: Manifest,
    expected_head: str | None,
    expected_generation: int,
    actor: str = "",
) -> VersionDocument:
    """Commit a version to a channel whose head the caller built on.

    If only the channel's generation moved and its head is still the caller's, the same commit is
    made with the new generation.

    Args:
        expected_head: version digest of the channel's head; None: there is no such channel.
        expected_generation: its generation; 0: there is no such channel.

    Raises:
        HeadMoved: another version is the head; `details` carries it, and why it moved.
        CommitUnknown: the registry went away before it said whether the commit happened.
    """
    generation = expected_generation
    for _ in range(_GENERATION_RETRIES):
        request = CommitRequest(
            channel=channel,
            expected_head=expected_head,
            expected_generation=generation,
            record=record.to_document(),
            manifest=manifest.to_document(),
            actor=actor,
        )
        try:
            return client.commit(policy, request, record.digest)
        except GenerationMoved as error:
            moved = error
        generation = client.channel(policy, channel).generation
    raise moved


def _batches(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    batch: list[Chunk] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += chunk.size
        if len(batch) == _BATCH_CHUNKS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _send_batch(
    client: RegistryClient,
    batch: list[Chunk],
    pool: ThreadPoolExecutor,
    progress: Progress,
    store: Store | None,
) -> None:
    missing = set(client.missing_chunks([chunk.digest for chunk in batch]))

    def send(chunk: Chunk) -> None:
        if chunk.digest in missing:
            if store is None:
                client.put_chunk(chunk.digest, chunk.data)
            else:
                key = object_key(chunk.digest)
                store.put(key, chunk.data)
                client.adopt_chunk(chunk.digest, key=key, size=chunk.size)
        progress.advance(chunk.size)

    sent: list[Future[None]] = [pool.submit(send, chunk) for chunk in batch]
    try:
        for future in sent:
            future.result()
    except BaseException:
        for future in sent:
            future.cancel()
        raise
