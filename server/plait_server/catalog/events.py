"""Events in SQL: numbered by one counter row, so that they commit in the order of their numbers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, select, update

from plait.wire import EventDocument
from plait_server.catalog.tables import events, registry
from plait_server.clock import now, wire_time


@dataclass(frozen=True, slots=True)
class News:
    """An event before it has a revision."""

    type: Literal["version_committed", "channel_moved", "policy_created"]
    policy: str
    channel: str | None
    payload: dict[str, Any]


def announce(connection: Connection, news: Sequence[News]) -> None:
    """Writes events. Last in a transaction: the counter's row is everybody's."""
    counted = update(registry).values(revision=registry.c.revision + len(news))
    last = connection.execute(counted.returning(registry.c.revision)).scalar_one()
    rows = [
        {
            "revision": last - len(news) + 1 + index,
            "type": item.type,
            "policy": item.policy,
            "channel": item.channel,
            "payload": json.dumps(item.payload),
            "at": now(),
        }
        for index, item in enumerate(news)
    ]
    connection.execute(events.insert(), rows)


def revision(connection: Connection) -> int:
    return int(connection.execute(select(registry.c.revision)).scalar_one())


def listing(
    connection: Connection, after: int, policy: str | None, limit: int
) -> list[EventDocument]:
    query = select(events).where(events.c.revision > after).order_by(events.c.revision)
    if policy is not None:
        query = query.where(events.c.policy == policy)
    return [
        EventDocument(
            revision=row.revision,
            type=row.type,
            policy=row.policy,
            channel=row.channel,
            payload=json.loads(row.payload),
            at=wire_time(row.at),
        )
        for row in connection.execute(query.limit(limit))
    ]
