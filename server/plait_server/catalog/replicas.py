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


def one(connection: Connection, owner: int, name: str, epoch: str) -> ReplicaRow:
    here = (replicas.c.policy_id == owner) & (replicas.c.name == name)
    row = connection.execute(select(replicas).where(here)).one()
    channel = ReplicaReport.model_validate_json(row.report).channel
    return _Judged(connection, owner, epoch, [channel]).replica(row)


def listing(connection: Connection, owner: int, epoch: str) -> list[ReplicaRow]:
    query = select(replicas).where(replicas.c.policy_id == owner).order_by(replicas.c.name)
    judged = _Judged(connection, owner, epoch)
    return [judged.replica(row) for row in connection.execute(query).all()]


class _Judged:
    """What replicas' channels and versions say of them; asked once for each channel and version.

    (Most of a fleet holds one of a few versions.)
    """

    def __init__(
        self, connection: Connection, owner: int, epoch: str, names: list[str] | None = None
    ) -> None:
        self._connection = connection
        self._owner = owner
        if names is None:
            found = channels.listing(connection, owner, epoch)
        else:
            each = (channels.find(connection, owner, name, epoch) for name in names)
            found = [channel for channel in each if channel is not None]
        self._heads: dict[str, ChannelDocument] = {channel.channel: channel for channel in found}
        self._known: dict[tuple[str, int], tuple[State | None, int | None]] = {}

    def replica(self, row: Row[Any]) -> ReplicaRow:
        sent = ReplicaReport.model_validate_json(row.report)
        recorded, left_at = None, None
        if sent.seq is not None:
            key = (sent.channel, sent.seq)
            if key not in self._known:
                self._known[key] = self._ask(*key)
            recorded, left_at = self._known[key]
        head = self._heads.get(sent.channel)
        return ReplicaRow(row.name, sent, row.last_seen_at, recorded, head, left_at)

    def _ask(self, channel: str, seq: int) -> tuple[State | None, int | None]:
        """The state recorded for a version, and when the channel last moved away from it."""
        query = (
            select(states)
            .join(versions, versions.c.state_id == states.c.id)
            .where(versions.c.policy_id == self._owner, versions.c.seq == seq)
        )
        state = self._connection.execute(query).one_or_none()
        if state is None:
            return None, None
        here = (channel_events.c.policy_id == self._owner) & (channel_events.c.channel == channel)
        same_weights = select(versions.c.id).where(versions.c.state_id == state.id)
        last_there = select(func.max(channel_events.c.generation)).where(
            here, channel_events.c.to_id.in_(same_weights)
        )
        left = (
            select(channel_events.c.at)
            .where(here, channel_events.c.generation > last_there.scalar_subquery())
            .order_by(channel_events.c.generation)
            .limit(1)
        )
        return State(state.layout_digest, state.fingerprint), self._connection.scalar(left)
