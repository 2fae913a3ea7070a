"""Request bodies: how large they may be, and how those that may be large are read.

The framework reads and parses a body in the event loop, where a large one would stop everybody.
So it gets small ones only; the routes that take more read the bytes themselves, within a budget of
memory, and parse them in a thread.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from plait import canonical
from plait.errors import LimitExceeded, RequestRejected, SizeMismatch
from plait.limits import CHUNK_BYTES_MAX, DOCUMENT_BYTES_MAX, MIB
from plait_server.budget import ByteBudget

BODY_BYTES_MAX: Final = max(CHUNK_BYTES_MAX, DOCUMENT_BYTES_MAX)
_ORDINARY_BYTES_MAX: Final = MIB

# Memory that a parsed document takes per byte of JSON (an array of small numbers is the worst).
_PARSED_FACTOR: Final = 16

RAW_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}

_Model = TypeVar("_Model", bound=BaseModel)


class BodyBound:
    """How many bytes the body of one request may have. Lies in its scope as `plait_body`."""

    def __init__(self) -> None:
        self.most = _ORDINARY_BYTES_MAX


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """What OpenAPI says of a JSON body that the route reads itself; `openapi.py` adds the model."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@asynccontextmanager
async def lent_body(request: Request, budget: ByteBudget, most: int) -> AsyncIterator[bytes]:
    """The whole body, read once there is memory for it, which is given back when the block ends.

    Args:
        most: bytes that it may have.

    Raises:
        LimitExceeded: more than `most` bytes; the rest isn't read.
        SizeMismatch: fewer bytes than Content-Length says.
        RequestRejected: the sender went away, or sent nothing for long.
    """
    request.scope["plait_body"].most = most
    text = request.headers.get("content-length")
    declared = None if text is None else int(text)  # the frame has seen that it is a number
    if declared is not None and declared > most:
        raise LimitExceeded(f"body of {declared} bytes; at most {most}")
    async with budget.lend(most if declared is None else declared):
        yield await _read(request, declared)


@asynccontextmanager
async def lent_document(
    request: Request, memory: "DocumentMemory", most: int
) -> AsyncIterator[bytes]:
    """As `lent_body`, and with the memory that it takes to parse the body as JSON."""
    async with (
        lent_body(request, memory.read, most) as data,
        # Only now: a slow sender must not keep the large share from others.
        memory.parsed.lend(_PARSED_FACTOR * len(data)),
    ):
        yield data


class DocumentMemory:
    """Memory for JSON bodies: as they arrive, and parsed.

    It is not the chunks', so that commits never wait for uploads.
    """

    def __init__(self) -> None:
        self.read = ByteBudget(4 * DOCUMENT_BYTES_MAX)
        self.parsed = ByteBudget(_PARSED_FACTOR * DOCUMENT_BYTES_MAX)


def parse_json(request: Request, data: bytes, model: type[_Model]) -> _Model:
    """A JSON body as its document. Blocks.

    Raises:
        RequestRejected: not said to be JSON (a web page may send anything else to anybody).
        DocumentInvalid: not JSON, or beyond what canonical documents may hold.
        RequestValidationError: JSON of another shape.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise RequestRejected("the body isn't said to be JSON; send Content-Type: application/json")
    try:
        return model.model_validate(canonical.read(data))
    except ValidationError as error:
        rows = error.errors(include_url=False, include_input=False, include_context=False)
        located = [{**row, "loc": ("body", *row["loc"])} for row in rows]
        raise RequestValidationError(located) from error


async def _read(request: Request, declared: int | None) -> bytes:
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
    except ClientDisconnect as gone:
        raise RequestRejected(f"the body broke off after {len(body)} bytes") from gone
    if declared is not None and len(body) != declared:
        raise SizeMismatch(
            f"body of {len(body)} bytes; Content-Length says {declared}",
            expected=declared,
            found=len(body),
        )
    return bytes(body)
