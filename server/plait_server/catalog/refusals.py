"""Refusals that the checks before a commit and the commit itself share."""

from collections.abc import Collection

from plait.errors import AlreadyExists, ChunkMissing
from plait.wire import VersionDocument


def require_chunks(missing: Collection[str]) -> None:
    """Raises ChunkMissing if there are any."""
    if missing:
        raise ChunkMissing(
            f"{len(missing)} chunks aren't in the registry: {', '.join(sorted(missing)[:3])}",
            remedy="upload them and commit again",
            missing=sorted(missing)[:1000],
        )


def replayed(version: VersionDocument, channel: str) -> VersionDocument:
    """The answer of the first time, if it is the same commit.

    Raises:
        AlreadyExists: it was another channel's.
    """
    if version.channel != channel:
        raise AlreadyExists(
            f"version {version.version_digest} was committed to {version.channel!r} as "
            f"{version.seq}, not to {channel!r}",
            remedy="move the other channel to it, or commit a record with a nonce of its own",
        )
    return version
