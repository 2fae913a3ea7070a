"""A registry for all tests of the folder, and what each of them needs of its own."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait_client.cache import ChunkCache
from plait_client.fetch import Fetcher
from plait_client.registry import RegistryClient
from tests.client.serving import ServedRegistry

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRegistry]:
    served = ServedRegistry(tmp_path_factory.mktemp("registry")).start()
    yield served
    served.stop()


@pytest.fixture
def client(registry: ServedRegistry) -> Iterator[RegistryClient]:
    with RegistryClient(registry.url) as client:
        yield client


@pytest.fixture
def fetcher(client: RegistryClient, tmp_path: Path) -> Fetcher:
    return Fetcher(client, ChunkCache(tmp_path / "cache"))


@pytest.fixture
def policy() -> str:
    """A name that no other test uses."""
    return f"policy-{next(_numbers)}"
