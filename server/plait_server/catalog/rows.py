"""What the catalog's files share: rows that may be there already, and rows by name."""

from typing import Any

from sqlalchemy import Connection, Table, select
from sqlalchemy.dialects import postgresql, sqlite

from plait_server.catalog.refusals import no_policy
from plait_server.catalog.tables import policies


def insert_or_keep(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> int:
    """Inserts rows but keeps those that are there already; returns how many are new."""
    if not rows:
        return 0
    sqlite_dialect = connection.dialect.name == "sqlite"
    insert = (sqlite.insert if sqlite_dialect else postgresql.insert)(table)
    counted = insert.on_conflict_do_nothing().execution_options(preserve_rowcount=True)
    return connection.execute(counted, rows).rowcount


def policy_id(connection: Connection, name: str, *, lock: bool = False) -> int:
    """A policy's row number.

    Args:
        lock: until the transaction ends, nobody else writes to this policy.

    Raises:
        NotFound: no such policy.
    """
    query = select(policies.c.id).where(policies.c.name == name)
    found = connection.scalar(query.with_for_update() if lock else query)
    if found is None:
        raise no_policy(name)
    return int(found)
