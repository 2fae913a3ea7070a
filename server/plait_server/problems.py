"""From errors to problem documents (RFC 9457): every answer of 400 and above is one."""

import json
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from plait.errors import NotFound, PlaitError, RequestRejected
from plait.wire.problem import MEDIA_TYPE, problem_of


class StatusError(Exception):
    """A PlaitError that is to be answered with another status than its class's own."""

    def __init__(self, error: PlaitError, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(str(error))
        self.error = error
        self.status = status
        self.headers = headers


def problem_response(
    error: PlaitError,
    request: Request,
    *,
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    problem = problem_of(
        error, instance=request.url.path, request_id=request.scope.get("plait_request_id", "")
    )
    if status is not None:
        problem = problem.model_copy(update={"status": status})
    named = dict(headers or {})
    if problem.status == HTTPStatus.UNAUTHORIZED:
        named.setdefault("www-authenticate", "Bearer")
    if problem.retryable:
        named.setdefault("retry-after", "1")
    # What a caller sent may be quoted, half of a surrogate pair included: as ASCII it can be said.
    return Response(json.dumps(problem.model_dump()), problem.status, named, MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Handlers for what is raised on purpose; `frame.py` answers for the rest."""

    @app.exception_handler(PlaitError)
    async def known(request: Request, error: PlaitError) -> Response:
        return problem_response(error, request)

    @app.exception_handler(StatusError)
    async def with_status(request: Request, wrapped: StatusError) -> Response:
        return problem_response(
            wrapped.error, request, status=wrapped.status, headers=wrapped.headers
        )

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        rows = [
            {"where": ".".join(map(str, row["loc"])), "what": row["msg"], "type": row["type"]}
            for row in error.errors()[:20]
        ]
        words = "; ".join(f"{row['where']}: {row['what']}" for row in rows[:4])
        rejected = RequestRejected(f"the request doesn't fit: {words}", errors=rows)
        return problem_response(rejected, request, status=HTTPStatus.UNPROCESSABLE_ENTITY)

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> Response:
        where = f"{request.method} {request.url.path}"
        if error.status_code == HTTPStatus.NOT_FOUND:
            return problem_response(NotFound(f"no such resource: {where}"), request)
        rejected = RequestRejected(f"{where}: {error.detail}")
        return problem_response(rejected, request, status=error.status_code, headers=error.headers)
