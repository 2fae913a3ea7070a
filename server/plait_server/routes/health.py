"""Health: for load balancers, orchestrators and Prometheus. No token needed."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from plait.errors import RegistryUnavailable
from plait_server.registry import RegistryDep

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="The process answers")
async def get_health() -> dict[str, str]:
    """Asks nobody."""
    return {"status": "ok"}


@router.get("/readyz", summary="Database and store answer")
async def get_readiness(registry: RegistryDep) -> dict[str, str]:
    """503 if the database can't be asked or the store can't be written. Probed every 5 seconds."""
    if registry.watch.stopping or not registry.watch.alive:
        raise RegistryUnavailable("the registry is shutting down or doesn't watch any more")
    error = await registry.unready()
    if error is not None:
        raise RegistryUnavailable(f"not ready: {error}", remedy=error.remedy)
    return {"status": "ready"}


@router.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
def get_metrics(registry: RegistryDep) -> Response:
    """Prometheus' text format."""
    return Response(generate_latest(registry.metrics.collectors), media_type=CONTENT_TYPE_LATEST)
