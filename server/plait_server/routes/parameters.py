"""Path parameters and raw bodies that several nouns share."""

from typing import Annotated, Any, Final

from fastapi import Path, Request
from pydantic import AfterValidator
from starlette.requests import ClientDisconnect

from plait.errors import LimitExceeded, RequestRejected, SizeMismatch
from plait.manifest import check_name


def _policy(name: str) -> str:
    return check_name(name, "policy")


def _channel(name: str) -> str:
    return check_name(name, "channel")


def _replica(name: str) -> str:
    return check_name(name, "replica")


PolicyPath = Annotated[
    str, Path(description="A policy's name", examples=["chat-7b"]), AfterValidator(_policy)
]
ChannelPath = Annotated[
    str, Path(description="A channel's name", examples=["main"]), AfterValidator(_channel)
]
ReplicaPath = Annotated[
    str, Path(description="A replica's name", examples=["engine-0"]), AfterValidator(_replica)
]
DigestPath = Annotated[
    str,
    Path(
        description="`sha256:` and 64 lower-case hex digits of the bytes",
        pattern=r"^sha256:[0-9a-f]{64}$",
        examples=["sha256:" + "0" * 64],
    ),
]
RefPath = Annotated[
    str,
    Path(
        description="A version: its number (`41`), a channel (`main`), a step back along its chain "
        "(`main~3`), or its version digest",
        max_length=256,
        examples=["main"],
    ),
]
FingerprintPath = Annotated[
    str, Path(description="32 hex digits", pattern=r"^[0-9a-f]{32}$", examples=["0" * 32])
]

# Objects named by their digest never change.
IMMUTABLE: Final = "public, max-age=31536000, immutable"

RAW_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def declared_length(request: Request, most: int) -> int | None:
    """Content-Length, checked before a byte is read; None where the sender doesn't say.

    Raises:
        LimitExceeded: more than `most`.
    """
    text = request.headers.get("content-length")
    if text is None:
        return None
    length = int(text)  # the outermost layer has seen that it is a number
    if length > most:
        raise LimitExceeded(f"body of {length} bytes; at most {most}")
    return length


async def read_body(request: Request, most: int) -> bytes:
    """The whole body.

    Raises:
        LimitExceeded: more than `most` bytes; the rest isn't read.
        SizeMismatch: fewer bytes than Content-Length says.
        RequestRejected: the sender went away.
    """
    declared = declared_length(request, most)
    body = bytearray()
    try:
        async for piece in request.stream():
            if len(body) + len(piece) > most:
                raise LimitExceeded(f"body of more than {most} bytes")
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
