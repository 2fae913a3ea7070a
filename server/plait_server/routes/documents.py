"""Canonical documents by digest: layouts and cuts come in here, all four kinds go out."""

from typing import Annotated

from fastapi import APIRouter, Header, Request, Response, status
from starlette.concurrency import run_in_threadpool

from plait.limits import DOCUMENT_BYTES_MAX
from plait_server.bodies import RAW_BODY, lent_document
from plait_server.registry import RegistryDep
from plait_server.routes.parameters import IMMUTABLE, DigestPath

router = APIRouter(prefix="/documents", tags=["documents"])


@router.put(
    "/{digest}",
    status_code=status.HTTP_201_CREATED,
    summary="Send a layout or a cut",
    responses={200: {"description": "The registry had it already"}},
    openapi_extra=RAW_BODY,
)
async def put_document(digest: DigestPath, request: Request, registry: RegistryDep) -> Response:
    """The body is the document's canonical bytes; they must have the digest. Safe to repeat."""
    async with lent_document(request, registry.document_memory, DOCUMENT_BYTES_MAX) as data:
        new = await run_in_threadpool(registry.documents.put, digest, data)
    return Response(status_code=status.HTTP_201_CREATED if new else status.HTTP_200_OK)


@router.get(
    "/{digest}",
    summary="A layout, cut, manifest or version record",
    response_class=Response,
    responses={200: {"content": {"application/json": {}}, "description": "Canonical bytes"}},
)
def get_document(
    digest: DigestPath,
    registry: RegistryDep,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Exactly the bytes that have the digest, cacheable for ever."""
    headers = {"etag": f'"{digest}"', "cache-control": IMMUTABLE}
    data = registry.catalog.document(digest).data
    if if_none_match is not None and headers["etag"] in if_none_match:
        return Response(status_code=status.HTTP_304_NOT_MODIFIED, headers=headers)
    return Response(data, media_type="application/json", headers=headers)
