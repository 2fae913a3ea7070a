"""Channels in SQL: where they point, how they move, and every movement there ever was."""

from functools import cache
from typing import Any, Final

from sqlalchemy import Connection, Row, Select, select, update
from sqlalchemy.exc import IntegrityError

from plait.errors import AlreadyExists, ConflictError, GenerationMoved, HeadMoved
from plait.lineage import DigestRef, Ref, SeqRef
from plait.wire import ChannelDocument, ChannelEvent, MoveKind, MoveRequest
from plait_server import failpoints
from plait_server.catalog import events
from plait_server.catalog import versions as versions_sql
from plait_server.catalog.refusals import no_channel
from plait_server.catalog.tables import channel_events, channels, policies, states, versions
from plait_server.clock import now, wire_time

_sources: Final = versions.alias("sources")


@cache
def _documents() -> Select[Any]:
    """Movements and what they pointed at."""
    return (
        select(
            channel_events,
            policies.c.name.label("policy"),
            versions.c.seq,
            versions.c.digest,
            states.c.layout_digest,
            states.c.fingerprint,
            _sources.c.seq.label("from_seq"),
        )
        .join(policies, policies.c.id == channel_events.c.policy_id)
        .join(versions, versions.c.id == channel_events.c.to_id)
        .join(states, states.c.id == versions.c.state_id)
        .outerjoin(_sources, _sources.c.id == channel_events.c.from_id)
    )


def _current(owner: int) -> Select[Any]:
    return (
        _documents()
        .join(
            channels,
            (channels.c.policy_id == channel_events.c.policy_id)
            & (channels.c.name == channel_events.c.channel)
            & (channels.c.generation == channel_events.c.generation),
        )
        .where(channels.c.policy_id == owner)
    )


def channel_document(row: Row[Any], epoch: str) -> ChannelDocument:
    return ChannelDocument(
        policy=row.policy,
        channel=row.channel,
        epoch=epoch,
        generation=row.generation,
        seq=row.seq,
        version_digest=row.digest,
        layout_digest=row.layout_digest,
        fingerprint=row.fingerprint,
        kind=row.kind,
        reason=row.reason,
        actor=row.actor,
        moved_at=wire_time(row.at),
    )


def listing(connection: Connection, owner: int, epoch: str) -> list[ChannelDocument]:
    rows = connection.execute(_current(owner).order_by(channels.c.name))
    return [channel_document(row, epoch) for row in rows]


def find(connection: Connection, owner: int, name: str, epoch: str) -> ChannelDocument | None:
    row = connection.execute(_current(owner).where(channels.c.name == name)).one_or_none()
    return None if row is None else channel_document(row, epoch)


def one(connection: Connection, owner: int, name: str, epoch: str) -> ChannelDocument:
    found = find(connection, owner, name, epoch)
    if found is None:
        raise no_channel(connection, owner, name)
    return found


def history(
    connection: Connection, owner: int, name: str, limit: int, before: int | None
) -> list[ChannelEvent]:
    query = _documents().where(
        channel_events.c.policy_id == owner, channel_events.c.channel == name
    )
    if before is not None:
        query = query.where(channel_events.c.generation < before)
    rows = connection.execute(query.order_by(channel_events.c.generation.desc()).limit(limit))
    found = [_event(row) for row in rows]
    if not found:
        _require(connection, owner, name)
    return found


def _require(connection: Connection, owner: int, name: str) -> None:
    here = (channels.c.policy_id == owner) & (channels.c.name == name)
    if connection.scalar(select(channels.c.generation).where(here)) is None:
        raise no_channel(connection, owner, name)


def _event(row: Row[Any]) -> ChannelEvent:
    return ChannelEvent(
        generation=row.generation,
        from_seq=row.from_seq,
        to_seq=row.seq,
        kind=row.kind,
        reason=row.reason,
        actor=row.actor,
        at=wire_time(row.at),
    )


def create(
    connection: Connection, policy: str, owner: int, name: str, to: Ref, actor: str, epoch: str
) -> ChannelDocument:
    """Generation 1 of a channel. The policy is locked."""
    if find(connection, owner, name, epoch) is not None:
        raise AlreadyExists(
            f"policy {policy!r} has a channel {name!r} already",
            remedy=f"`plait channel move {policy} {name} --to REF` moves it",
            policy=policy,
            channel=name,
        )
    target = versions_sql.id_of(connection, owner, to)
    point(connection, owner, name, target, kind="create", reason="", actor=actor)
    document = one(connection, owner, name, epoch)
    events.announce(connection, [moved_news(policy, document)])
    return document


def move(
    connection: Connection, policy: str, owner: int, name: str, to: Ref, wanted: MoveRequest,
    epoch: str,
) -> tuple[ChannelDocument, bool]:  # fmt: skip
    """One movement by an operator, or the answer of the same one before. The policy is locked."""
    if (before := _moved_before(connection, owner, name, to, wanted, epoch)) is not None:
        return before, True
    channel = one(connection, owner, name, epoch)
    if channel.generation != wanted.expected_generation:
        raise conflict(connection, owner, name, channel, wanted.expected_generation, moved=False)
    target = versions_sql.id_of(connection, owner, to)
    point(
        connection, owner, name, target,
        kind=wanted.kind, reason=wanted.reason, actor=wanted.actor,
        expected_generation=wanted.expected_generation, move_id=wanted.move_id,
    )  # fmt: skip
    document = one(connection, owner, name, epoch)
    events.announce(connection, [moved_news(policy, document)])
    failpoints.reach("move.written")
    return document, False


def _moved_before(
    connection: Connection, owner: int, name: str, to: Ref, wanted: MoveRequest, epoch: str
) -> ChannelDocument | None:
    query = _documents().where(
        channel_events.c.policy_id == owner, channel_events.c.move_id == wanted.move_id
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    same = (row.channel, row.kind, row.generation) == (
        name, wanted.kind, wanted.expected_generation + 1,
    )  # fmt: skip
    # A REF by channel may name another version by now, and still be the same request.
    if isinstance(to, SeqRef):
        same = same and row.seq == to.seq
    elif isinstance(to, DigestRef):
        same = same and row.digest == to.digest
    if not same:
        raise AlreadyExists(
            f"move_id {wanted.move_id!r} was used for a {row.kind} of {row.channel!r} to "
            f"{row.seq}, generation {row.generation}",
            remedy="give each move a random move_id of its own",
        )
    return channel_document(row, epoch)


def point(
    connection: Connection, owner: int, name: str, to_id: int, *, kind: MoveKind, reason: str,
    actor: str, expected_generation: int = 0, move_id: str | None = None,
) -> int:  # fmt: skip
    """Compare-and-set: from the expected generation (0: no channel yet) to the next one.

    Returns:
        The new generation.
    Raises:
        HeadMoved: somebody else moved it in this very moment.
    """
    here = (channels.c.policy_id == owner) & (channels.c.name == name)
    generation = expected_generation + 1
    from_id = connection.scalar(select(channels.c.version_id).where(here))
    if expected_generation == 0:
        row = {"policy_id": owner, "name": name, "version_id": to_id, "generation": generation}
        try:
            connection.execute(channels.insert().values(**row))
        except IntegrityError as error:
            raise HeadMoved(f"channel {name!r} was created meanwhile", channel=name) from error
    else:
        expected = here & (channels.c.generation == expected_generation)
        moved = update(channels).where(expected).values(version_id=to_id, generation=generation)
        if connection.execute(moved).rowcount != 1:
            raise HeadMoved(f"channel {name!r} moved meanwhile", channel=name)
    connection.execute(
        channel_events.insert().values(
            policy_id=owner, channel=name, generation=generation, from_id=from_id, to_id=to_id,
            kind=kind, reason=reason, actor=actor, move_id=move_id, at=now(),
        )
    )  # fmt: skip
    return generation


def conflict(
    connection: Connection, owner: int, name: str, channel: ChannelDocument | None,
    expected_generation: int, *, moved: bool,
) -> ConflictError:  # fmt: skip
    """Why a compare-and-set was refused: head, generation and last event, in words and details.

    Args:
        moved: the head itself isn't the expected one.
    """
    if channel is None:
        return (HeadMoved if moved else GenerationMoved)(
            f"channel {name!r} doesn't exist, but a head or a generation was expected",
            remedy="commit with expected_head null and expected_generation 0 to create it",
            head=None,
            generation=0,
            event=None,
        )
    head = versions_sql.by_digest(connection, owner, channel.version_digest)
    assert head is not None
    last = history(connection, owner, name, 1, None)[0]
    details = {
        "head": head.model_dump(mode="json"),
        "generation": channel.generation,
        "event": last.model_dump(mode="json"),
    }
    why = f" ({last.reason})" if last.reason else ""
    by = f" by {last.actor}" if last.actor else ""
    where = f"channel {name!r} is at version {channel.seq}, generation {channel.generation}"
    if not moved:
        return GenerationMoved(
            f"{where}, not {expected_generation}: moved by a {last.kind}{by}{why}",
            remedy="look at the channel and try again with its generation",
            **details,
        )
    return HeadMoved(
        f"{where}: moved by a {last.kind}{by}{why}",
        remedy="take over the head and build on it, or ask whoever moved it",
        **details,
    )


def moved_news(policy: str, document: ChannelDocument) -> events.News:
    shown = {
        "generation",
        "seq",
        "version_digest",
        "layout_digest",
        "fingerprint",
        "kind",
        "reason",
    }
    payload = document.model_dump(mode="json", include=shown)
    return events.News("channel_moved", policy, document.channel, payload)
