"""Replicas in SQL."""

from typing import Any

from sqlalchemy import Connection, Row, func, select, update

from plait.lineage import State
from plait.wire import ChannelDocument, ReplicaReport
from plait_server.catalog import channels
from plait_server.catalog.base import ReplicaRow
from plait_server.catalog.rows import insert_or_keep
from plait_server.catalog.tables import channel_events, replicas, states, versions
from plait_server.clock import now


def report(connection: Connection, owner: int, name: str, sent: ReplicaReport) -> None:
    values = {"report": sent.model_dump_json(), "last_seen_at": now()}
    here = (replicas.c.policy_id == owner) & (replicas.c.name == name)
    if connection.execute(update(replicas).where(here).values(**values)).rowcount == 0:
        row = {"policy_id": owner, "name": name} | values
        if insert_or_keep(connection, replicas, [row]) == 0:
            connection.execute(update(replicas).where(here).values(**values))


def listing(
    connection: Connection, owner: int, epoch: str, name: str | None = None
) -> list[ReplicaRow]:
    query = select(replicas).where(replicas.c.policy_id == owner).order_by(replicas.c.name)
    if name is not None:
        query = query.where(replicas.c.name == name)
    heads = {c.channel: c for c in channels.listing(connection, owner, epoch)}
    return [_replica(connection, owner, row, heads) for row in connection.execute(query).all()]


def _replica(
    connection: Connection, owner: int, row: Row[Any], heads: dict[str, ChannelDocument]
) -> ReplicaRow:
    sent = ReplicaReport.model_validate_json(row.report)
    recorded = left_at = None
    if sent.seq is not None:
        query = (
            select(states.c.layout_digest, states.c.fingerprint)
            .join(versions, versions.c.state_id == states.c.id)
            .where(versions.c.policy_id == owner, versions.c.seq == sent.seq)
        )
        found = connection.execute(query).one_or_none()
        recorded = None if found is None else State(found.layout_digest, found.fingerprint)
    if recorded is not None:
        left_at = _left_at(connection, owner, sent.channel, recorded)
    return ReplicaRow(row.name, sent, row.last_seen_at, recorded, heads.get(sent.channel), left_at)


def _left_at(connection: Connection, owner: int, channel: str, state: State) -> int | None:
    """When the channel last moved away from these weights."""
    here = (channel_events.c.policy_id == owner) & (channel_events.c.channel == channel)
    last_there = (
        select(func.max(channel_events.c.generation))
        .join(versions, versions.c.id == channel_events.c.to_id)
        .join(states, states.c.id == versions.c.state_id)
        .where(
            here,
            states.c.layout_digest == state.layout,
            states.c.fingerprint == state.fingerprint,
        )
        .scalar_subquery()
    )
    query = select(func.min(channel_events.c.at)).where(
        here, channel_events.c.generation > last_there
    )
    left_at: int | None = connection.scalar(query)
    return left_at
