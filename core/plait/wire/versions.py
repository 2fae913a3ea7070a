"""Versions: immutable committed states."""

from typing import Any, Literal

from plait.wire.base import Count, Digest, FingerprintHex, Name, Seq, Time, WireDocument


class VersionDocument(WireDocument):
    """Sent by the registry; also the `--json` of `plait publish` and `plait show`.

    Attributes:
        seq: its number within the policy.
        parent: seq of the version that it was made from, None for the first of a line.
        kind: of its first manifest.
        external: its anchor's bytes are not stored: both sides already hold them.
        channel, generation: the channel that its commit moved, and the generation which that made.
        changed_elements, changed_bytes: against the base; all of them for an anchor.
        payload_bytes: what a follower at the base must fetch: chunks, manifest and cut.
    """

    policy: Name
    seq: Seq
    parent: Seq | None
    parent_digest: Digest | None
    kind: Literal["delta", "anchor"]
    external: bool
    channel: Name
    generation: Count
    fingerprint: FingerprintHex
    proof: Literal["full", "incremental", "unproven"]
    layout_digest: Digest
    version_digest: Digest
    manifest_digest: Digest
    cut_digest: Digest | None
    changed_elements: Count
    changed_bytes: Count
    total_elements: Count
    dense_bytes: Count
    payload_bytes: Count
    metadata: dict[str, Any]
    actor: str
    committed_at: Time


class VersionPage(WireDocument):
    """Newest first. `before` asks for the next page; None: there is none."""

    versions: list[VersionDocument]
    before: Seq | None
