"""Chunks: immutable objects by digest, in and out as raw bytes."""

from collections.abc import AsyncIterator
from typing import Annotated, Final

from fastapi import APIRouter, Header, Request, Response, status
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from plait.limits import CHUNK_BYTES_MAX, MIB
from plait.wire import AdoptRequest, ChunkDocument, MissingRequest, MissingResponse
from plait_server.bodies import RAW_BODY, json_body, lent_body, lent_document, parse_json
from plait_server.catalog import StoredChunk
from plait_server.chunks import Reading, Taken
from plait_server.registry import Registry, RegistryDep
from plait_server.routes.parameters import IMMUTABLE, DigestPath
from plait_server.routes.ranges import ByteRange, parse_range

router = APIRouter(tags=["chunks"])

# Each reader holds one or two slices of the chunk that it is sent: what a thousand slow ones hold
# must fit in memory.
_SLICE_BYTES: Final = 2 * MIB
_MISSING_BYTES_MAX: Final = 16 * MIB  # as many digests as a manifest may name

IfNoneMatch = Annotated[str | None, Header()]
RangeHeader = Annotated[str | None, Header(alias="range", examples=["bytes=0-1023"])]


@router.post(
    "/chunks:missing",
    summary="Which of these chunks have to be uploaded",
    openapi_extra=json_body(MissingRequest),
)
async def missing_chunks(request: Request, registry: RegistryDep) -> MissingResponse:
    """Those that are unknown, whose object is gone or has another size, or were found damaged when
    they were last read. Changes nothing."""

    def missing(data: bytes) -> list[str]:
        return registry.chunks.missing(parse_json(request, data, MissingRequest).digests)

    async with lent_document(request, registry.document_memory, _MISSING_BYTES_MAX) as body:
        return MissingResponse(missing=await registry.in_store_thread(missing, body))


@router.put(
    "/chunks/{digest}",
    status_code=status.HTTP_201_CREATED,
    summary="Upload a chunk",
    response_model=ChunkDocument,
    responses={200: {"model": ChunkDocument, "description": "The registry had it already"}},
    openapi_extra=RAW_BODY,
)
async def put_chunk(digest: DigestPath, request: Request, registry: RegistryDep) -> Response:
    """The body is the chunk, with Content-Length. It is stored, then recorded, then answered for.

    Safe to repeat. A chunk whose stored object is damaged is mended by it.
    """
    async with lent_body(request, registry.uploads, CHUNK_BYTES_MAX) as data:
        chunk, taken = await registry.in_store_thread(registry.chunks.put, digest, data)
        registry.metrics.chunk_bytes.labels("in").inc(len(data))
    return _taken(registry, chunk, taken)


@router.post(
    "/chunks/{digest}:adopt",
    status_code=status.HTTP_201_CREATED,
    summary="Record a chunk that lies in the store already",
    response_model=ChunkDocument,
    responses={200: {"model": ChunkDocument, "description": "The registry had one already"}},
)
async def adopt_chunk(digest: DigestPath, body: AdoptRequest, registry: RegistryDep) -> Response:
    """For agents that reach the store themselves. The object is read back before it counts."""
    adopt = registry.chunks.adopt
    return _taken(registry, *await registry.in_store_thread(adopt, digest, body.key, body.size))


@router.get(
    "/chunks/{digest}",
    summary="A chunk's bytes",
    response_class=Response,
    responses={
        200: {"content": {"application/octet-stream": {}}, "description": "The whole chunk"},
        206: {"content": {"application/octet-stream": {}}, "description": "One range of it"},
    },
)
async def get_chunk(
    digest: DigestPath,
    registry: RegistryDep,
    if_none_match: IfNoneMatch = None,
    range_: RangeHeader = None,
) -> Response:
    """Whole, or one range of it; cacheable for ever."""
    return await _chunk_response(registry, digest, if_none_match, range_, body=True)


@router.head("/chunks/{digest}", summary="A chunk's size", response_class=Response)
async def head_chunk(
    digest: DigestPath,
    registry: RegistryDep,
    if_none_match: IfNoneMatch = None,
    range_: RangeHeader = None,
) -> Response:
    """The headers of GET."""
    return await _chunk_response(registry, digest, if_none_match, range_, body=False)


def _taken(registry: Registry, chunk: StoredChunk, taken: Taken) -> Response:
    registry.metrics.chunks.labels(taken).inc()
    document = ChunkDocument(digest=chunk.digest, size=chunk.size, key=chunk.key)
    code = status.HTTP_200_OK if taken == "kept" else status.HTTP_201_CREATED
    return JSONResponse(document.model_dump(mode="json"), code)


async def _chunk_response(
    registry: Registry, digest: str, if_none_match: str | None, range_: str | None, *, body: bool
) -> Response:
    chunk = await run_in_threadpool(registry.chunks.find, digest)
    headers = {"etag": f'"{digest}"', "cache-control": IMMUTABLE, "accept-ranges": "bytes"}
    if if_none_match is not None and headers["etag"] in if_none_match:
        return Response(status_code=status.HTTP_304_NOT_MODIFIED, headers=headers)
    part = parse_range(range_, chunk.size)
    wanted = part or ByteRange(0, chunk.size)
    headers["content-length"] = str(wanted.length)
    code = status.HTTP_200_OK
    if part is not None:
        code = status.HTTP_206_PARTIAL_CONTENT
        headers["content-range"] = f"bytes {part.start}-{part.end - 1}/{chunk.size}"
    if not body:
        return Response(None, code, headers, "application/octet-stream")
    reading = Reading(registry.chunks, chunk)
    # The first slice is read before the head goes out: a lost object is a typed answer.
    first = await _slice(registry, reading, wanted.start, wanted.end)
    rest = _slices(registry, reading, wanted.start + len(first), wanted.end, first)
    return StreamingResponse(rest, code, headers, "application/octet-stream")


async def _slice(registry: Registry, reading: Reading, start: int, end: int) -> bytes:
    length = min(end - start, _SLICE_BYTES)
    data = await registry.in_store_thread(reading.read, start, length)
    registry.metrics.chunk_bytes.labels("out").inc(length)
    return data


async def _slices(
    registry: Registry, reading: Reading, start: int, end: int, first: bytes
) -> AsyncIterator[bytes]:
    yield first
    while start < end:
        data = await _slice(registry, reading, start, end)
        start += len(data)
        yield data
