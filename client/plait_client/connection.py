"""What a command needs to reach the registry, from the environment.

`PLAIT_URL` is the registry's address, `PLAIT_TOKEN` the bearer token, `PLAIT_CACHE` the cache and
`PLAIT_CACHE_BYTES` what it may hold.
"""

import getpass
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from plait.store import Store, open_store
from plait_client.cache import ChunkCache
from plait_client.fetch import Fetcher
from plait_client.registry import RegistryClient

DEFAULT_URL: Final = "http://127.0.0.1:8400"


def registry_url() -> str:
    return os.environ.get("PLAIT_URL") or DEFAULT_URL


@contextmanager
def connected() -> Iterator[RegistryClient]:
    """A client of the environment's registry.

    Raises:
        UsageError: `PLAIT_URL` isn't an address, or `PLAIT_TOKEN` no token.
    """
    with RegistryClient(registry_url(), token=os.environ.get("PLAIT_TOKEN") or None) as client:
        yield client


def fetcher_of(client: RegistryClient) -> Fetcher:
    """A fetcher with the user's cache, and the store if the registry hands it out."""

    def direct_store() -> Store | None:
        direct = client.config().direct_store
        return None if direct is None else open_store(direct)

    return Fetcher(client, ChunkCache(), store=direct_store)


def actor() -> str:
    """Who acts, for the registry's history: the user's name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""  # a container's user may have no name
