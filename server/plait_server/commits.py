"""Commits: every check that needs no lock, and then the catalog's one short transaction.

Blocks; routes call it in threads.
"""

from collections.abc import Iterable

from plait.errors import (
    BaseMismatch,
    DocumentInvalid,
    FingerprintMismatch,
    PlaitError,
    SizeMismatch,
    UnknownBase,
)
from plait.limits import CHUNK_BYTES_MAX
from plait.manifest import Manifest
from plait.names import check_name
from plait.version_record import VersionRecord
from plait.wire import CommitRequest, VersionDocument
from plait_server import failpoints
from plait_server.catalog import Catalog, Draft
from plait_server.catalog.refusals import replayed, require_chunks
from plait_server.documents import Documents
from plait_server.metrics import Metrics


class Commits:
    """The door for versions."""

    def __init__(self, catalog: Catalog, documents: Documents, metrics: Metrics) -> None:
        self._catalog = catalog
        self._documents = documents
        self._metrics = metrics

    def commit(self, policy: str, request: CommitRequest) -> tuple[VersionDocument, bool]:
        """The committed version, and whether it had been committed before.

        Raises:
            FormatError: a document that breaks its own rules, or is unknown.
            FingerprintMismatch: record, manifest and increments don't agree.
            BaseMismatch, UnknownBase, LayoutChanged: it doesn't continue its parent.
            ChunkMissing, SizeMismatch: a chunk isn't there as the manifest has it.
            HeadMoved, GenerationMoved: somebody else moved the channel.
        """
        result = "failed"
        try:
            with self._metrics.commit_seconds.time():
                version, again = self._commit(policy, request)
            result = "replayed" if again else "committed"
        except PlaitError as error:
            result = error.code
            raise
        finally:
            self._metrics.commits.labels(result).inc()
        return version, again

    def _commit(self, policy: str, request: CommitRequest) -> tuple[VersionDocument, bool]:
        record = VersionRecord.from_document(request.record)
        manifest = Manifest.from_document(request.manifest)
        check_name(request.channel, "channel")
        before = self._catalog.committed(policy, record.digest)
        if before is not None:
            return replayed(before, request.channel), True
        _check_agreement(policy, record, manifest)
        cut_bytes = self._check_documents(manifest)
        self._check_parent(policy, record, manifest)
        self._check_chunks(manifest)
        failpoints.reach("commit.checked")
        draft = Draft(
            policy=policy,
            channel=request.channel,
            expected_head=request.expected_head,
            expected_generation=request.expected_generation,
            record=record,
            manifest=manifest,
            payload_bytes=manifest.chunk_bytes + len(manifest.data) + cut_bytes,
            actor=request.actor,
        )
        answer = self._catalog.commit(draft)
        failpoints.reach("commit.committed")
        return answer

    def _check_documents(self, manifest: Manifest) -> int:
        """Layout and cut are known and fit; returns the cut's bytes."""
        layout = self._documents.layout_facts(manifest.layout)
        counted = manifest.statistics
        if (counted.total_elements, counted.dense_bytes) != (
            layout.total_elements,
            layout.dense_bytes,
        ):
            raise DocumentInvalid(
                f"the manifest counts {counted.total_elements} elements and {counted.dense_bytes} "
                f"bytes; its layout has {layout.total_elements} and {layout.dense_bytes}"
            )
        whole = manifest.kind == "anchor" and not manifest.external
        if manifest.cut is None:
            if whole and layout.total_words:
                raise DocumentInvalid("an anchor holds every frame, but this one has no cut")
            return 0
        cut = self._documents.cut_facts(manifest.cut)
        if cut.layout != manifest.layout:
            raise DocumentInvalid(f"the cut belongs to layout {cut.layout}, not {manifest.layout}")
        frames = {number for chunk in manifest.chunks for number in chunk.frames}
        if frames and max(frames) >= cut.frames:
            raise DocumentInvalid(f"frame {max(frames)} in a cut of {cut.frames} frames")
        if whole and (len(frames) != cut.frames or not cut.covers):
            raise DocumentInvalid(
                f"an anchor holds every word: it has {len(frames)} of {cut.frames} frames, "
                f"and its cut {'covers' if cut.covers else 'does not cover'} the layout"
            )
        return cut.size

    def _check_parent(self, policy: str, record: VersionRecord, manifest: Manifest) -> None:
        if record.parent is None:
            if manifest.kind == "delta":
                raise DocumentInvalid("a delta's version record names its parent")
            return
        parent = self._catalog.committed(policy, record.parent)
        if parent is None:
            raise UnknownBase(
                f"the record's parent {record.parent} is no version of policy {policy!r}",
                remedy="attach again: ask which version has the weights that you hold",
            )
        if manifest.base is None:
            return
        if parent.layout_digest != record.layout:
            known = self._documents.layout(parent.layout_digest)
            known.require_equal(self._documents.layout(record.layout), what="the new version")
        if parent.fingerprint != str(manifest.base):
            raise BaseMismatch(
                f"the delta leads from {manifest.base}, but its parent, version {parent.seq}, "
                f"has the fingerprint {parent.fingerprint}",
                expected=parent.fingerprint,
                found=str(manifest.base),
            )

    def _check_chunks(self, manifest: Manifest) -> None:
        named = [(chunk.digest, chunk.size) for chunk in manifest.chunks]
        named += [(side_file.digest, side_file.size) for side_file in manifest.side_files]
        known = self._catalog.chunks({digest for digest, _ in named})
        require_chunks({digest for digest, _ in named} - set(known))
        _check_sizes((digest, size, known[digest].size) for digest, size in named)


def _check_agreement(policy: str, record: VersionRecord, manifest: Manifest) -> None:
    if record.policy != policy:
        raise DocumentInvalid(f"the version record is of policy {record.policy!r}, not {policy!r}")
    if record.layout != manifest.layout:
        raise DocumentInvalid(
            f"the record's layout is {record.layout}, the manifest's {manifest.layout}"
        )
    if record.fingerprint != manifest.target:
        raise FingerprintMismatch(
            f"the record's fingerprint is {record.fingerprint}, but the manifest leads to "
            f"{manifest.target}",
            expected=str(record.fingerprint),
            found=str(manifest.target),
        )
    counted = manifest.statistics
    if counted.chunk_bytes != manifest.chunk_bytes:
        raise DocumentInvalid(
            f"the manifest counts {counted.chunk_bytes} bytes of chunks and names "
            f"{manifest.chunk_bytes}"
        )
    if (
        counted.changed_elements > counted.total_elements
        or counted.changed_bytes > counted.dense_bytes
    ):
        raise DocumentInvalid("the manifest counts more changed elements than there are")


def _check_sizes(sizes: Iterable[tuple[str, int, int]]) -> None:
    for digest, named, held in sizes:
        if named != held or named > CHUNK_BYTES_MAX:
            raise SizeMismatch(
                f"the manifest gives chunk {digest} {named} bytes; it has {held}",
                expected=named, found=held,
            )  # fmt: skip
