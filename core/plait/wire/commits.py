"""A commit: what the publisher believed, and what it wants."""

from typing import Any

from plait.wire.base import Actor, Digest, Generation, Name, WireRequest


class CommitRequest(WireRequest):
    """Sent by publishers. Safe to repeat: the version digest is the idempotency key.

    Attributes:
        channel: moved to the new version; created if it doesn't exist and `expected_head` is null.
        expected_head: version digest of the channel's head as the publisher knows it.
        expected_generation: the channel's generation as the publisher knows it (0: no channel).
        record: the version record, a canonical document.
        manifest: its first manifest, a canonical document.
        actor: who commits, for the history.
    """

    channel: Name
    expected_head: Digest | None
    expected_generation: Generation
    record: dict[str, Any]
    manifest: dict[str, Any]
    actor: Actor = ""
