"""Brings a database to this release's schema, and names its epoch."""

import secrets
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, select, text

import plait_server
from plait_server.catalog.database import Database
from plait_server.catalog.tables import registry

# Any number: two registries that start at once on one PostgreSQL migrate one after the other.
_MIGRATION_LOCK: Final = 0x706C616974


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, for one open connection if given."""
    scripts = scripts_folder()
    config = Config(scripts / "alembic.ini")
    config.set_main_option("script_location", str(scripts))
    config.attributes["connection"] = connection
    return config


def scripts_folder() -> Path:
    """The migrations: inside the installed package, or at the repository's root."""
    package = Path(plait_server.__file__).parent
    installed = package / "migrations"
    return installed if installed.is_dir() else package.parents[1] / "migrations"


def migrate(database: Database) -> str:
    """Migrates to the newest schema in one transaction; returns the epoch."""
    with database.write() as connection:
        if not database.is_sqlite:
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
        command.upgrade(alembic_config(connection), "head")
        epoch = connection.scalar(select(registry.c.epoch))
        if epoch is None:
            epoch = secrets.token_hex(8)
            connection.execute(registry.insert().values(id=1, epoch=epoch, revision=0))
        return str(epoch)
