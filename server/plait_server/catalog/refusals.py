"""Refusals that the catalog's files share."""

from collections.abc import Collection

from sqlalchemy import Connection, select

from plait.errors import AlreadyExists, ChunkMissing, NotFound
from plait.wire import VersionDocument
from plait_server.catalog.tables import policies


def no_policy(name: str) -> NotFound:
    """To be raised: no policy has this name."""
    return NotFound(
        f"no policy {name!r}",
        remedy="is its name right, and is PLAIT_URL its registry? "
        "`plait publish DIR --policy NAME` makes a new one",
        policy=name,
    )


def no_channel(connection: Connection, owner: int, channel: str) -> NotFound:
    """To be raised: the policy has no such channel."""
    policy = _name_of(connection, owner)
    return NotFound(
        f"policy {policy!r} has no channel {channel!r}",
        remedy=f"`plait channel list {policy}` names those that it has",
        policy=policy,
        channel=channel,
    )


def no_version(connection: Connection, owner: int, ref: str) -> NotFound:
    """To be raised: the policy has no version that `ref` would name."""
    policy = _name_of(connection, owner)
    return NotFound(
        f"policy {policy!r} has no version {ref}",
        remedy=f"`plait log {policy}` names those that it has",
        policy=policy,
        version=ref,
    )


def _name_of(connection: Connection, owner: int) -> str:
    return str(connection.scalar(select(policies.c.name).where(policies.c.id == owner)))


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
