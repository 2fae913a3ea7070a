"""A registry for all tests, and one of their own for those that stop it."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plait_client.cache import ChunkCache
from plait_client.fetch import Fetcher
from plait_client.registry import RegistryClient

from .line import Line
from .registry_process import RegistryProcess
from .states import State, fresh_state


@pytest.fixture(scope="session")
def shared_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryProcess]:
    process = RegistryProcess(tmp_path_factory.mktemp("registry"))
    process.start()
    yield process
    process.stop()


@pytest.fixture
def own_registry(tmp_path: Path) -> Iterator[RegistryProcess]:
    process = RegistryProcess(tmp_path / "registry")
    process.start()
    yield process
    process.stop()


@pytest.fixture
def client(shared_registry: RegistryProcess) -> Iterator[RegistryClient]:
    with RegistryClient(shared_registry.url, attempts=2) as client:
        yield client


@pytest.fixture
def fetcher(client: RegistryClient, tmp_path: Path) -> Fetcher:
    return Fetcher(client, ChunkCache(tmp_path / "cache"))


@pytest.fixture
def new_line(client: RegistryClient) -> Callable[..., Line]:
    def make(first: State | None = None, **options: bool) -> Line:
        return Line(client, f"p-{uuid.uuid4().hex[:8]}", first or fresh_state(), **options).start()  # type: ignore[arg-type]

    return make
