"""Path parameters that several nouns share."""

from typing import Annotated, Final

from fastapi import Path
from pydantic import AfterValidator

from plait.names import check_name


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
