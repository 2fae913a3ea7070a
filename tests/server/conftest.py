"""Fixtures of the registry's tests: everything runs on SQLite and on PostgreSQL."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from plait.store import MemoryStore
from plait_server.app import create_app
from plait_server.catalog import SqlCatalog
from plait_server.settings import Settings
from tests.server.postgres import PostgresServer, postgres_server
from tests.server.processes import RegistryProcess, registry_process

DATABASES = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@contextmanager
def new_database(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """URL of a new, empty database of the kind that the fixture's parameter names."""
    if request.param == "sqlite":
        yield f"sqlite:///{folder / 'plait.db'}"
        return
    server = request.getfixturevalue("postgres")
    url = server.new_database()
    yield url
    server.drop_database(url)


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a new, empty database for one test."""
    with new_database(request, tmp_path) as url:
        yield url


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture(scope="module", params=DATABASES)
def http(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, store: MemoryStore
) -> Iterator[TestClient]:
    """A client of a registry in this process, one for all tests of a file: policies differ."""
    with new_database(request, tmp_path_factory.mktemp("registry")) as url:
        app = create_app(Settings(), catalog=SqlCatalog(url), store=store)
        with TestClient(app) as client:
            yield client


@pytest.fixture(scope="session", params=DATABASES)
def two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RegistryProcess, RegistryProcess]]:
    """Two real registry processes on one database, for all tests that don't end them."""
    folder = tmp_path_factory.mktemp("two")
    with (
        new_database(request, folder) as url,
        registry_process(folder, url) as first,
        registry_process(folder, url) as second,
    ):
        yield first, second
