"""Problem documents (RFC 9457): how an error crosses HTTP and comes out as the same class."""

from typing import Any, Final

from pydantic import ConfigDict, Field

from plait.errors import (
    PlaitError,
    RegistryUnavailable,
    RequestRejected,
    ServiceError,
    type_registry,
)
from plait.wire.base import WireDocument

MEDIA_TYPE: Final = "application/problem+json"


class Problem(WireDocument):
    """Sent by the registry with every status of 400 and above.

    Attributes:
        type: a stable URI reference, `/problems/CODE`.
        code: PlaitError.code; what a program should look at.
        retryable: the same request may simply be sent again.
        remedy: what the reader can do.
        details: facts, by name (the head, the missing digests…).
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool = False
    remedy: str = ""
    instance: str = ""
    request_id: str = ""
    details: dict[str, Any] = Field(default_factory=dict)


def problem_of(error: PlaitError, *, instance: str = "", request_id: str = "") -> Problem:
    """The document for an error; its status is the class's `http_status`."""
    return Problem(
        type=f"/problems/{error.code}",
        title=type(error).__name__,
        status=error.http_status,
        detail=error.message,
        code=error.code,
        retryable=error.retryable,
        remedy=error.remedy,
        instance=instance,
        request_id=request_id,
        details=error.details,
    )


def error_of(problem: Problem) -> PlaitError:
    """The error that a document stands for; an unknown code keeps its meaning by status."""
    cls = type_registry.get(problem.code)
    if cls is None:
        cls = RegistryUnavailable if problem.status in (429, 502, 503, 504) else RequestRejected
        if problem.status == 500:
            cls = ServiceError
    error = cls(problem.detail, remedy=problem.remedy)
    # Not as keywords: whoever answered may have chosen any names.
    error.details = dict(problem.details)
    return error
