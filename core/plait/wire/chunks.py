"""Chunks: immutable stored objects. Bodies travel raw; these are the words around them."""

from typing import Annotated

from pydantic import Field

from plait.limits import CHUNK_BYTES_MAX, CHUNKS_PER_MANIFEST_MAX
from plait.wire.base import Count, Digest, WireDocument, WireRequest


class MissingRequest(WireRequest):
    """Sent by publishers before they upload. Safe to repeat."""

    digests: Annotated[list[Digest], Field(max_length=CHUNKS_PER_MANIFEST_MAX)]


class MissingResponse(WireDocument):
    """Which of them the registry doesn't hold."""

    missing: list[Digest]


class AdoptRequest(WireRequest):
    """Sent by a publisher that wrote the object into the store itself. Safe to repeat.

    The registry reads it back and checks size and digest before it believes in it.
    """

    key: Annotated[str, Field(min_length=1, max_length=512)]
    size: Annotated[int, Field(ge=0, le=CHUNK_BYTES_MAX)]


class ChunkDocument(WireDocument):
    """Sent by the registry: a chunk that it holds. `key` is its name in the store."""

    digest: Digest
    size: Count
    key: str
