"""Alembic's environment: the catalog's tables, on a connection that the registry hands over."""

import os
from pathlib import Path

from alembic import context
from sqlalchemy import Connection

from plait_server.catalog.database import Database
from plait_server.catalog.tables import metadata


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        # SQLite alters tables by copying them.
        render_as_batch=connection.dialect.name == "sqlite",
        compare_type=True,
    )
    with context.begin_transaction():
        context.run_migrations()


def main() -> None:
    handed_over = context.config.attributes.get("connection")
    if handed_over is not None:
        run(handed_over)
        return
    default = f"sqlite:///{Path('.plait-data/plait.db').absolute()}"
    database = Database(os.environ.get("PLAIT_DATABASE_URL", default))
    with database.write() as connection:
        run(connection)
    database.close()


main()
