"""From errors to problem documents (RFC 9457): every answer of 400 and above is one."""

import logging
import re
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.errors import LimitExceeded, NotFound, PlaitError, RequestRejected, ServiceError
from plait.limits import DOCUMENT_BYTES_MAX, METADATA_BYTES_MAX
from plait.wire.problem import MEDIA_TYPE, problem_of
from plait_server.metrics import Metrics

_log: Final = logging.getLogger("plait.server")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")

# A commit carries a manifest and a record in one body; no other body is larger.
BODY_BYTES_MAX: Final = DOCUMENT_BYTES_MAX + 4 * METADATA_BYTES_MAX


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
    return Response(problem.model_dump_json(), problem.status, named, MEDIA_TYPE)


def install(app: FastAPI, metrics: Metrics) -> None:
    """Handlers for what is raised, and the outermost layer for what nobody foresaw."""

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

    app.add_middleware(RequestFrame, metrics=metrics)


class RequestFrame:
    """Around every request: an id, a bound on the body, and an answer whatever happens."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        sent_id = headers.get("x-request-id", "")
        request_id = sent_id if _REQUEST_ID.fullmatch(sent_id) else secrets.token_hex(8)
        scope["plait_request_id"] = request_id
        answer = _Answer(send, request_id)
        try:
            await self._bounded(scope, receive, answer.send, headers)
        except Exception as error:
            if not isinstance(error, PlaitError):
                _log.exception(
                    "%s %s failed (request %s)", scope["method"], scope["path"], request_id
                )
            if answer.status:
                raise  # the head is out: all that is left is to break the connection
            known = error if isinstance(error, PlaitError) else _unforeseen(request_id)
            await problem_response(known, Request(scope))(scope, receive, answer.send)
        finally:
            self._metrics.requests.labels(answer.status or "none").inc()

    async def _bounded(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        declared = headers.get("content-length", "0")
        if not declared.isdigit() or int(declared) > BODY_BYTES_MAX:
            raise _too_large(declared)
        taken = 0
        overrun: LimitExceeded | None = None

        async def counted() -> Message:
            nonlocal taken, overrun
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > BODY_BYTES_MAX:
                overrun = _too_large(f"at least {taken}")
                raise overrun
            return message

        async def unless_overrun(message: Message) -> None:
            # Frameworks take a failed read for a malformed body; what they answer isn't the reason.
            if overrun is None:
                await send(message)

        await self._app(scope, counted, unless_overrun)
        if overrun is not None:
            raise overrun


class _Answer:
    """Puts the request's id on the answer and remembers its status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self._request_id
        await self._send(message)


def _too_large(size: str) -> LimitExceeded:
    return LimitExceeded(f"request body of {size} bytes; at most {BODY_BYTES_MAX}")


def _unforeseen(request_id: str) -> ServiceError:
    return ServiceError(
        "the registry met an error that it didn't foresee",
        remedy=f"its log has the cause under request {request_id}",
    )
