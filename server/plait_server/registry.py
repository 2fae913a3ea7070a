"""What the routes work with, wired once per application."""

import time
from collections.abc import Callable
from typing import Annotated, Final, TypeVar

import anyio
from fastapi import Depends, Request

from plait.errors import PlaitError
from plait.store import Store
from plait_server.bodies import DocumentMemory
from plait_server.budget import ByteBudget
from plait_server.catalog import Catalog
from plait_server.chunks import Chunks
from plait_server.commits import Commits
from plait_server.documents import Documents
from plait_server.fleet import Fleet
from plait_server.metrics import Metrics
from plait_server.planner import Planner
from plait_server.settings import Settings
from plait_server.watch import Watch

_STORE_THREADS: Final = 24
_READY_SECONDS: Final = 5.0  # a probe writes into the store: not more often than this

_Result = TypeVar("_Result")


class Registry:
    """The services behind the routes. Lives as long as the application."""

    def __init__(self, settings: Settings, catalog: Catalog, store: Store) -> None:
        self.settings = settings
        self.catalog = catalog
        self.store = store
        self.metrics = Metrics()
        self.documents = Documents(catalog)
        self.chunks = Chunks(catalog, store)
        self.commits = Commits(catalog, self.documents, self.metrics)
        self.planner = Planner(catalog, self.documents)
        self.fleet = Fleet(catalog)
        self.watch = Watch(catalog, self.metrics)
        self.uploads = ByteBudget(settings.upload_memory_bytes)
        self.document_memory = DocumentMemory()
        # A slow store must not take the threads that answer commits and watchers.
        self.store_threads = anyio.CapacityLimiter(_STORE_THREADS)
        self._probing = anyio.Lock()
        self._probed: tuple[float, PlaitError | None] = (float("-inf"), None)

    async def in_store_thread(self, call: Callable[..., _Result], *arguments: object) -> _Result:
        """Runs what may wait for the store."""
        return await anyio.to_thread.run_sync(call, *arguments, limiter=self.store_threads)

    async def unready(self) -> PlaitError | None:
        """Why requests would fail now, or None; asked anew after five seconds."""
        async with self._probing:
            at, found = self._probed
            if time.monotonic() - at >= _READY_SECONDS:
                found = await self.in_store_thread(self._probe)
                self._probed = (time.monotonic(), found)
            return found

    def _probe(self) -> PlaitError | None:
        try:
            self.catalog.check()
            self.store.check()
        except PlaitError as error:
            return error
        return None

    def close(self) -> None:
        self.chunks.close()
        self.catalog.close()


def registry_of(request: Request) -> Registry:
    found = request.app.state.registry
    assert isinstance(found, Registry)
    return found


RegistryDep = Annotated[Registry, Depends(registry_of)]
