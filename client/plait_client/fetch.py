"""The way down: documents and chunks by digest, in parallel, verified, cached.

What is in the cache isn't fetched again, so a fetch that stopped goes on where it was. Chunks come
through the registry, or straight from the store where the caller reaches it.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from plait.canonical import digest_of
from plait.codec.chunks import ChunkReader, read_chunk
from plait.cut import Cut
from plait.errors import (
    CorruptionError,
    DigestMismatch,
    DocumentInvalid,
    ObjectMissing,
    StoreUnavailable,
)
from plait.layout import Layout
from plait.manifest import ChunkEntry, Manifest
from plait.store import Store
from plait.wire import PlanChunk, PlanStep
from plait_client.cache import ChunkCache
from plait_client.progress import SILENT, Progress
from plait_client.registry import RegistryClient

_DOWNLOAD_ATTEMPTS: Final = 2  # bytes that were damaged on the way, not at rest, come right at once
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FetchedStep:
    """A plan's step with everything that it takes, proven by digest and lying in the cache.

    Attributes:
        step: of the plan.
        manifest, layout: the step's documents.
        cut: checked against the layout; None where nothing changes.
        paths: of the manifest's chunks, in its order.
    """

    step: PlanStep
    manifest: Manifest
    layout: Layout
    cut: Cut | None
    paths: tuple[Path, ...]
    _read: Callable[[ChunkEntry], bytes] = field(repr=False)

    @cached_property
    def entry_of(self) -> Mapping[int, ChunkEntry]:
        """The chunk of each frame that the step touches."""
        return {number: entry for entry in self.manifest.chunks for number in entry.frames}

    def open(self, entry: ChunkEntry) -> ChunkReader:
        """A chunk of this step, its bytes and directory checked against the manifest."""
        return read_chunk(self._read(entry), entry=entry)


class Fetcher:
    """Fetches from one registry into one cache. Safe to share between threads."""

    def __init__(
        self,
        client: RegistryClient,
        cache: ChunkCache,
        *,
        store: Store | Callable[[], Store | None] | None = None,
        workers: int = 4,
    ) -> None:
        """Opens nothing yet.

        Args:
            store: where the registry's objects lie, if the caller can read it itself; or a
                function that finds it, asked when the first object has to be fetched.
        """
        self.client = client
        self.cache = cache
        self._find_store = store if callable(store) else lambda: store
        self._workers = workers
        self._layouts: dict[str, Layout] = {}
        self._cuts: dict[str, Cut] = {}

    @cached_property
    def store(self) -> Store | None:
        """Where the objects lie, if the caller reaches it itself."""
        return self._find_store()

    def document(self, digest: str) -> bytes:
        """A canonical document's bytes. Errors as RegistryClient.document."""
        held = self.cache.read(digest)
        if held is None:
            held = self.client.document(digest)
            self.cache.put(digest, held)
        return held

    def layout(self, digest: str) -> Layout:
        if digest not in self._layouts:
            self._layouts[digest] = Layout.parse(self.document(digest))
        return self._layouts[digest]

    def cut(self, digest: str, layout: Layout) -> Cut:
        """A cut that fits `layout`.

        Raises:
            DocumentInvalid: it doesn't fit.
        """
        if digest not in self._cuts:
            cut = Cut.parse(self.document(digest))
            cut.check_against(layout)
            self._cuts[digest] = cut
        cut = self._cuts[digest]
        if cut.layout_digest != layout.digest:
            cut.check_against(layout)  # which refuses it
        return cut

    def manifest(self, digest: str) -> Manifest:
        return Manifest.parse(self.document(digest))

    def object(self, digest: str, size: int, key: str = "") -> bytes:
        """A chunk's or side file's bytes, proven by digest, from the cache or from far.

        Args:
            key: in the store, as plans carry it.

        Raises:
            NotFound, ObjectMissing: nobody has it.
            SizeMismatch, DigestMismatch: what is stored under this digest is something else.
        """
        held = self.cache.read(digest, size)
        if held is not None:
            return held
        data = self._download(digest, size, key)
        self.cache.put(digest, data)
        return data

    def fetch_step(self, step: PlanStep, progress: Progress | None = None) -> FetchedStep:
        """Fetch what a plan's step takes; returns when all of it lies verified in the cache.

        Args:
            progress: told of every chunk's bytes; `begin` is the caller's.

        Raises:
            DocumentInvalid: the step and its manifest contradict each other.
            Others as `document` and `object`; they name the chunk.
        """
        manifest = self.manifest(step.manifest_digest)
        _check_step(step, manifest)
        layout = self.layout(manifest.layout)
        cut = None if manifest.cut is None else self.cut(manifest.cut, layout)
        if cut is not None and any(e.frames[-1] >= len(cut.frames) for e in manifest.chunks):
            raise DocumentInvalid(f"manifest {manifest.digest} names frames that its cut lacks")
        wanted = [PlanChunk(digest=e.digest, size=e.size, key="") for e in manifest.chunks]
        wanted += [PlanChunk(digest=s.digest, size=s.size, key="") for s in manifest.side_files]
        keys = {chunk.digest: chunk.key for chunk in (*step.chunks, *step.side_files)}
        self._fetch_all(wanted, keys, progress or SILENT)
        return FetchedStep(
            step=step,
            manifest=manifest,
            layout=layout,
            cut=cut,
            paths=tuple(self.cache.path_of(entry.digest) for entry in manifest.chunks),
            _read=lambda entry: self.object(entry.digest, entry.size, keys.get(entry.digest, "")),
        )

    def _fetch_all(
        self, wanted: Iterable[PlanChunk], keys: Mapping[str, str], progress: Progress
    ) -> None:
        def fetch(chunk: PlanChunk) -> None:
            self.object(chunk.digest, chunk.size, keys.get(chunk.digest, ""))
            progress.advance(chunk.size)

        with ThreadPoolExecutor(self._workers, thread_name_prefix="plait-fetch") as pool:
            # One download for each digest: two of one file would race for nothing.
            distinct = {chunk.digest: chunk for chunk in wanted}
            futures = [pool.submit(fetch, chunk) for chunk in distinct.values()]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                # After an interrupt too: the pool would fetch all that waits before it ends.
                for future in futures:
                    future.cancel()
            for future in done:
                future.result()

    def _download(self, digest: str, size: int, key: str) -> bytes:
        for attempt in range(_DOWNLOAD_ATTEMPTS):
            try:
                return self._download_once(digest, size, key)
            except CorruptionError:
                if attempt == _DOWNLOAD_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _download_once(self, digest: str, size: int, key: str) -> bytes:
        if self.store is not None and key:
            try:
                data = self.store.get(key)
            except (ObjectMissing, StoreUnavailable) as error:
                _logger.warning("reading %s through the registry instead: %s", key, error)
            else:
                if len(data) == size and digest_of(data) == digest:
                    return data
                raise DigestMismatch(f"{key} in {self.store.url} isn't {digest} of {size} bytes")
        return self.client.chunk(digest, size)


def _check_step(step: PlanStep, manifest: Manifest) -> None:
    """The registry's plan is a claim; the manifest, named by digest, is what will be followed."""
    base = None if manifest.base is None else str(manifest.base)
    ends = (base, str(manifest.target))
    said = (step.base, step.target)
    kind = "external" if manifest.external else manifest.kind
    expected_kind = "delta" if step.kind in ("forward", "reverse") else step.kind
    if step.kind == "reverse":
        ends = (ends[1], str(base))
    if kind != expected_kind or ends != said or manifest.layout != step.layout_digest:
        raise DocumentInvalid(
            f"the plan's {step.kind} step from {said[0]} to {said[1]} isn't what manifest "
            f"{manifest.digest} says ({kind}, {ends[0]} to {ends[1]})"
        )
