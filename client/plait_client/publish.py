"""Publish a checkpoint folder: an anchor first, then what changed since the channel's head.

Everything about the folder and the base is checked before the first byte is sent, and the commit
comes last: whatever stops a publish, no reader sees a part of it.
"""

import contextlib
import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plait.canonical import digest_of
from plait.errors import (
    AlreadyExists,
    BaseMismatch,
    FingerprintMismatch,
    NotFound,
    UsageError,
)
from plait.fingerprint import Fingerprint
from plait.grain import SlottedCut, grain_cut, kv_heads_of
from plait.manifest import ChunkEntry, Manifest, SideFile, Statistics
from plait.version_record import VersionRecord
from plait.weights import Weights, fingerprint_weights
from plait.wire import VersionDocument
from plait_client.checkout_folder import refuse_torn
from plait_client.checkpoint import CheckpointFolder
from plait_client.encode import FrameEncoder
from plait_client.failpoints import failpoint
from plait_client.fetch import Fetcher
from plait_client.mirror import Mirror, open_mirror
from plait_client.pending import Pending, PendingCommit
from plait_client.progress import SILENT, Progress
from plait_client.refs import usable_name
from plait_client.registry import RegistryClient
from plait_client.shards import read_side_file
from plait_client.upload import (
    commit_version,
    put_cut,
    put_layout,
    upload_frames,
    upload_object,
)

Mode = Literal["delta", "anchor", "external"]


@dataclass(frozen=True, slots=True)
class Request:
    """What to publish, and how.

    Attributes:
        folder: of .safetensors files.
        policy, channel: the channel to move.
        base: folder that holds the base's weights; None: the mirror does.
        mode: what the first manifest is; `delta` becomes `anchor` in a new policy.
        message: kept in the version's metadata.
        actor: who commits, for the history.
        grain: shares that ranks of an engine can fetch apart; 1 for none.
    """

    folder: Path
    policy: str
    channel: str = "main"
    base: Path | None = None
    mode: Mode = "delta"
    message: str = ""
    actor: str = ""
    grain: int = 1


@dataclass(frozen=True, slots=True)
class _Head:
    """Where the channel is now; `version` is what the publish builds on."""

    version: VersionDocument | None
    expected: str | None
    generation: int


def publish(
    request: Request,
    fetcher: Fetcher,
    *,
    progress: Progress | None = None,
    workers: int = 2,
) -> VersionDocument:
    """Publish a folder; returns the committed version.

    Raises:
        UsageError: names that no policy or channel can have, or a channel without a base.
        CheckpointInvalid, LayoutInvalid, LimitExceeded: the folder isn't one checkpoint.
        LayoutChanged: other names, dtypes or shapes than the head's: needs a new anchor.
        BaseMismatch: `base` isn't the head, or an external line has no base here yet.
        HeadMoved: somebody published meanwhile; nothing is lost, publish again.
        CommitUnknown, RegistryUnavailable: publish again; a commit that happened is found.
    """
    usable_name(request.policy, "policy")
    usable_name(request.channel, "channel")
    for folder in filter(None, (request.folder, request.base)):
        refuse_torn(folder)
    new = CheckpointFolder(request.folder)
    side_files = list(new.side_files())
    with open_mirror(request.policy, fetcher, progress or SILENT) as mirror:
        pending = Pending(mirror.path.with_name(mirror.path.name + ".pending.json"))
        run = _Publish(request, fetcher, new, mirror, pending, progress or SILENT, workers)
        version = run.replayed() or run.commit(side_files)
        failpoint("publish.committed")
        mirror.follow(version, new)
        # Last: whoever was killed before this was told nothing, and publishes again.
        pending.clear()
    return version


class _Publish:
    """One publish, while it holds the policy's mirror."""

    def __init__(
        self,
        request: Request,
        fetcher: Fetcher,
        new: CheckpointFolder,
        mirror: Mirror,
        pending: Pending,
        progress: Progress,
        workers: int,
    ) -> None:
        self._request = request
        self._fetcher = fetcher
        self._client: RegistryClient = fetcher.client
        self._new = new
        self._mirror = mirror
        self._pending = pending
        self._progress = progress
        self._workers = workers

    def replayed(self) -> VersionDocument | None:
        """The version of a publish whose answer was lost, if it was this one and it happened."""
        before = self._pending.read()
        if before is None:
            return None
        request = self._request
        same = (before.channel, before.layout, before.message) == (
            request.channel,
            self._new.layout.digest,
            request.message,
        )
        if same and before.fingerprint == str(fingerprint_weights(self._new)):
            return self._client.find_commit(request.policy, before.version_digest)
        return None

    def commit(self, side_files: list[tuple[str, Path]]) -> VersionDocument:
        head = self._head()
        if head.version is None or self._request.mode != "delta":
            manifest = self._anchor(side_files)
        else:
            manifest = self._delta(head.version)
        self._new.require_unchanged()
        record = VersionRecord(
            policy=self._request.policy,
            layout=manifest.layout,
            parent=None if head.version is None else head.version.version_digest,
            fingerprint=manifest.target,
            proof="unproven" if manifest.external else "full",
            nonce=secrets.token_hex(16),
            metadata=self._metadata(),
        )
        self._pending.write(
            PendingCommit(
                version_digest=record.digest,
                channel=self._request.channel,
                layout=manifest.layout,
                fingerprint=str(manifest.target),
                message=self._request.message,
            )
        )
        failpoint("publish.uploaded")
        return commit_version(
            self._client,
            policy=self._request.policy,
            channel=self._request.channel,
            record=record,
            manifest=manifest,
            expected_head=head.expected,
            expected_generation=head.generation,
            actor=self._request.actor,
        )

    def _metadata(self) -> dict[str, Any]:
        return {"message": self._request.message} if self._request.message else {}

    def _head(self) -> _Head:
        """The channel's head, or nothing for a policy's first version. Makes the policy."""
        client, request = self._client, self._request
        try:
            channel = client.channel(request.policy, request.channel)
        except NotFound:
            return self._head_of_new_channel()
        version = client.version(request.policy, channel.version_digest)
        return _Head(version, channel.version_digest, channel.generation)

    def _head_of_new_channel(self) -> _Head:
        client, request = self._client, self._request
        try:
            versions = client.versions(request.policy, limit=1).versions
        except NotFound:
            # Somebody may publish at the same time: the commit decides who is first.
            with contextlib.suppress(AlreadyExists):
                client.create_policy(request.policy)
            versions = []
        if not versions or request.mode != "delta":
            return _Head(None, None, 0)
        if request.base is None:
            raise UsageError(
                f"policy {request.policy!r} has no channel {request.channel!r}",
                remedy=f"`plait channel create {request.policy} {request.channel} --to REF` first, "
                "or name the new line's base with --base DIR",
            )
        base = CheckpointFolder(request.base)
        found = str(fingerprint_weights(base))
        return _Head(client.versions_with(request.policy, base.layout.digest, found)[0], None, 0)

    def _anchor(self, side_files: list[tuple[str, Path]]) -> Manifest:
        layout = self._new.layout
        put_layout(self._client, layout)
        if self._request.mode == "external":
            return Manifest(
                kind="anchor",
                layout=layout.digest,
                cut=None,
                base=None,
                target=fingerprint_weights(self._new),
                chunks=(),
                statistics=self._statistics(layout.total_elements, layout.dense_bytes, []),
                external=True,
            )
        cut = self._cut(for_anchor=True)
        encoder, chunks = self._upload(cut, None)
        return Manifest(
            kind="anchor",
            layout=layout.digest,
            cut=cut.cut.digest if chunks else None,
            base=None,
            target=encoder.increment,
            chunks=tuple(chunks),
            statistics=self._statistics(layout.total_elements, layout.dense_bytes, chunks),
            side_files=tuple(self._upload_side_file(*side_file) for side_file in side_files),
        )

    def _delta(self, head: VersionDocument) -> Manifest:
        layout = self._new.layout
        if layout.digest != head.layout_digest:
            known = self._fetcher.layout(head.layout_digest)
            known.require_equal(layout, what=f"{self._new.path}")
        target = fingerprint_weights(self._new)
        base = Fingerprint.parse(head.fingerprint)
        chunks: list[ChunkEntry] = []
        changed_elements = changed_bytes = 0
        cut = self._cut(for_anchor=False)
        old = self._base_weights(head)
        if target != base:
            encoder, chunks = self._upload(cut, old)
            if base + encoder.increment != target and self._request.base is None:
                # Only a mirror that isn't the head can be the cause: bits rot, and people edit.
                encoder, chunks = self._upload(cut, self._mirror.rebuild(head))
            if base + encoder.increment != target:
                raise FingerprintMismatch(
                    f"{self._new.path} or its base changed while it was read: they add up to "
                    f"{base + encoder.increment}, a full pass found {target}",
                    remedy="publish again when nobody writes to them",
                )
            changed_elements, changed_bytes = encoder.changed_elements, encoder.changed_bytes
        return Manifest(
            kind="delta",
            layout=layout.digest,
            cut=cut.cut.digest if chunks else None,
            base=base,
            target=target,
            chunks=tuple(chunks),
            statistics=self._statistics(changed_elements, changed_bytes, chunks),
        )

    def _base_weights(self, head: VersionDocument) -> Weights:
        """The head's bits: proven here for `--base`, by the sum of the changes for the mirror."""
        if self._request.base is None:
            return self._mirror.weights_of(head)
        base = CheckpointFolder(self._request.base)
        found = str(fingerprint_weights(base))
        if (base.layout.digest, found) != (head.layout_digest, head.fingerprint):
            raise BaseMismatch(
                f"{base.path} isn't version {head.seq}, the head of {self._request.channel!r}: it "
                f"has fingerprint {found}, expected {head.fingerprint}",
                remedy="give the folder of the head's weights, or leave --base out",
                expected=head.fingerprint,
                found=found,
            )
        return base

    def _cut(self, *, for_anchor: bool) -> SlottedCut:
        return grain_cut(
            self._new.layout,
            grain=self._request.grain,
            for_anchor=for_anchor,
            kv_heads=_kv_heads(self._request.folder / "config.json"),
        )

    def _upload(
        self, slotted: SlottedCut, old: Weights | None
    ) -> tuple[FrameEncoder, list[ChunkEntry]]:
        """Send the frames of an anchor (`old` None) or of the changes since `old`."""
        cut = slotted.cut
        self._progress.begin("publishing", sum(frame.nbytes for frame in cut.frames))
        encoder = FrameEncoder(cut, workers=self._workers, progress=self._progress)
        frames = encoder.dense(self._new) if old is None else encoder.deltas(old, self._new)
        chunks = upload_frames(
            self._client,
            frames,
            slot=slotted.slots,
            workers=self._workers,
            store=self._fetcher.store,
            keep=None if old is None else self._fetcher.cache.put,
        )
        if chunks:
            put_cut(self._client, cut)
        return encoder, chunks

    def _upload_side_file(self, name: str, path: Path) -> SideFile:
        data = read_side_file(path)
        side_file = SideFile(name=name, digest=digest_of(data), size=len(data))
        upload_object(self._client, side_file.digest, data)
        return side_file

    def _statistics(
        self, changed_elements: int, changed_bytes: int, chunks: list[ChunkEntry]
    ) -> Statistics:
        layout = self._new.layout
        return Statistics(
            changed_elements=changed_elements,
            changed_bytes=changed_bytes,
            total_elements=layout.total_elements,
            dense_bytes=layout.dense_bytes,
            chunk_bytes=sum(chunk.size for chunk in chunks),
        )


def _kv_heads(config: Path) -> int | None:
    """What a checkpoint's config says, if there is one that can be read."""
    try:
        fields = json.loads(config.read_bytes())
    except (OSError, ValueError):
        return None
    return kv_heads_of(fields) if isinstance(fields, dict) else None
