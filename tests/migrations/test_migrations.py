"""Migrations: up from nothing, down again, and equal to the tables that the catalog uses."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, select

from plait_server.catalog.database import Database
from plait_server.catalog.migrate import alembic_config, migrate
from plait_server.catalog.tables import metadata, registry
from tests.server.postgres import postgres_server


@pytest.fixture(
    scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]
)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('migrations') / 'plait.db'}"
    else:
        with postgres_server() as server:
            yield server.new_database()


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    opened = Database(url)
    yield opened
    with opened.write() as connection:
        command.downgrade(alembic_config(connection), "base")
    opened.close()


def tables(database: Database) -> set[str]:
    with database.read() as connection:
        return set(inspect(connection).get_table_names()) - {"alembic_version"}


def test_up_from_nothing_makes_exactly_the_catalogs_tables(database: Database) -> None:
    migrate(database)
    assert tables(database) == set(metadata.tables)
    with database.write() as connection:
        command.check(alembic_config(connection))


def test_down_leaves_nothing_and_up_works_again(database: Database) -> None:
    migrate(database)
    with database.write() as connection:
        command.downgrade(alembic_config(connection), "base")
    assert tables(database) == set()
    migrate(database)
    assert tables(database) == set(metadata.tables)


def test_a_second_start_keeps_the_epoch(database: Database) -> None:
    epoch = migrate(database)
    assert migrate(database) == epoch
    with database.read() as connection:
        assert connection.scalars(select(registry.c.epoch)).all() == [epoch]


def test_a_migration_that_fails_leaves_no_half_a_schema(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: object) -> None:
        raise RuntimeError("killed in the middle")

    monkeypatch.setattr("plait_server.catalog.migrate.secrets.token_hex", broken)
    with pytest.raises(RuntimeError):
        migrate(database)
    assert tables(database) == set()
    monkeypatch.undo()
    migrate(database)


def test_there_is_one_newest_revision() -> None:
    scripts = ScriptDirectory.from_config(alembic_config())
    assert len(scripts.get_heads()) == 1
    for script in scripts.walk_revisions():
        assert Path(script.path).name.startswith(f"{script.revision}_")
