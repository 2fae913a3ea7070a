"""Policies in SQL."""

from collections import defaultdict

from sqlalchemy import Connection, select
from sqlalchemy.exc import IntegrityError

from plait.errors import AlreadyExists
from plait.wire import PolicyDocument
from plait_server.catalog import events
from plait_server.catalog.refusals import no_policy
from plait_server.catalog.tables import channels, policies
from plait_server.clock import now, wire_time


def create(connection: Connection, name: str) -> PolicyDocument:
    created_at = now()
    row = {"name": name, "next_seq": 1, "graph_revision": 0, "created_at": created_at}
    try:
        connection.execute(policies.insert().values(**row))
    except IntegrityError as error:
        raise AlreadyExists(f"a policy {name!r} exists already", policy=name) from error
    events.announce(connection, [events.News("policy_created", name, None, {})])
    return PolicyDocument(name=name, created_at=wire_time(created_at), versions=0, channels=[])


def listing(connection: Connection, name: str | None = None) -> list[PolicyDocument]:
    """All policies, or the one with that name; by name."""
    query = select(policies).order_by(policies.c.name)
    names = select(channels.c.policy_id, channels.c.name).order_by(channels.c.name)
    if name is not None:
        query = query.where(policies.c.name == name)
        names = names.join(policies).where(policies.c.name == name)
    by_policy: dict[int, list[str]] = defaultdict(list)
    for owner, channel in connection.execute(names):
        by_policy[owner].append(channel)
    return [
        PolicyDocument(
            name=row.name,
            created_at=wire_time(row.created_at),
            versions=row.next_seq - 1,
            channels=by_policy[row.id],
        )
        for row in connection.execute(query)
    ]


def one(connection: Connection, name: str) -> PolicyDocument:
    found = listing(connection, name)
    if not found:
        raise no_policy(name)
    return found[0]
