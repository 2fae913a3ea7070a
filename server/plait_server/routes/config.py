"""What this registry can do."""

from importlib.metadata import version

from fastapi import APIRouter

from plait.limits import CHUNK_BYTES_MAX, DOCUMENT_BYTES_MAX, WAIT_SECONDS_MAX
from plait.manifest import MANIFEST_FORMAT
from plait.version_record import RECORD_FORMAT
from plait.wire import ConfigDocument
from plait_server.documents import ACCEPTED
from plait_server.registry import RegistryDep

router = APIRouter(tags=["config"])


@router.get("/config", summary="Formats, limits and the epoch")
def get_config(registry: RegistryDep) -> ConfigDocument:
    """Read by clients at start. Generations compare within one epoch only."""
    return ConfigDocument(
        version=version("plait"),
        epoch=registry.catalog.epoch,
        formats=[*ACCEPTED, MANIFEST_FORMAT, RECORD_FORMAT],
        chunk_bytes_max=CHUNK_BYTES_MAX,
        document_bytes_max=DOCUMENT_BYTES_MAX,
        wait_seconds_max=WAIT_SECONDS_MAX,
        direct_store=registry.settings.direct_store,
    )
