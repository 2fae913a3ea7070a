"""The application: wiring only."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import APIRouter, FastAPI

from plait.store import Store, open_store
from plait_server import openapi, problems
from plait_server.catalog import Catalog, SqlCatalog
from plait_server.frame import RequestFrame
from plait_server.registry import Registry
from plait_server.routes import (
    channels,
    chunks,
    commits,
    config,
    documents,
    events,
    health,
    plans,
    policies,
    replicas,
    versions,
)
from plait_server.settings import Settings

_NOUNS = (
    config, policies, documents, chunks, commits, versions, channels, plans, replicas, events,
)  # fmt: skip

_DESCRIPTION = """
Version control for the weights of policies that are trained by reinforcement learning.

A publisher sends **documents** and **chunks** (objects first), then one **commit**, which moves a
**channel**. Followers watch the channel, ask for a **plan** from what they hold, and report what
they serve. Every refusal is a problem document (RFC 9457) with a stable `code`.
"""


def create_app(
    settings: Settings | None = None,
    *,
    catalog: Catalog | None = None,
    store: Store | None = None,
) -> FastAPI:
    """The registry as an ASGI application.

    Args:
        settings: from the environment if None.
        catalog, store: opened by the settings if None. Either way the application closes the
            catalog when it shuts down.
    """
    settings = settings or Settings()
    registry = Registry(
        settings,
        catalog or SqlCatalog(settings.database),
        store or open_store(settings.store_url, settings.store_options),
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await registry.watch.start()
        yield
        await registry.watch.close()
        registry.close()

    app = FastAPI(
        title="plait registry",
        version=version("plait"),
        description=_DESCRIPTION,
        lifespan=lifespan,
    )
    app.state.registry = registry
    openapi.describe(app)
    problems.install(app)
    app.add_middleware(RequestFrame, metrics=registry.metrics, token=settings.token)
    v1 = APIRouter(prefix="/v1")
    for noun in _NOUNS:
        v1.include_router(noun.router)
    app.include_router(v1)
    app.include_router(health.router)
    return app
