"""Around every request: who may come in, how much may be said, and an answer whatever happens."""

import asyncio
import logging
import re
import secrets
from collections.abc import Mapping
from typing import Final

from fastapi import Request
from pydantic import SecretStr
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.errors import (
    LimitExceeded,
    PlaitError,
    RequestRejected,
    ServiceError,
    Unauthenticated,
)
from plait_server.bodies import BODY_BYTES_MAX, BodyBound
from plait_server.metrics import Metrics
from plait_server.problems import problem_response

_log: Final = logging.getLogger("plait.server")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_GUARDED: Final = "/v1/"


class RequestFrame:
    """The outermost layer: an id, the token, a bound on the body, and an answer in every case.

    It stands before the framework because that reads a body before it asks for anything else.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, token: SecretStr | None, idle_seconds: float = 60.0
    ) -> None:
        """
        Args:
            token: what every request below /v1 must carry; None: anybody may come.
            idle_seconds: a body of which nothing arrives for so long is given up.
        """
        self._app = app
        self._metrics = metrics
        self._token = None if token is None else token.get_secret_value().encode()
        self._idle_seconds = idle_seconds

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
            if scope["path"].startswith(_GUARDED):
                self._require_token(headers)
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

    def _require_token(self, headers: Mapping[str, str]) -> None:
        if self._token is None:
            return
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(
            sent.strip().encode(), self._token
        ):
            raise Unauthenticated(
                "this registry asks for a token", remedy="set PLAIT_TOKEN to the registry's token"
            )

    async def _bounded(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        declared = _declared(headers)
        bound = scope["plait_body"] = BodyBound()
        taken = 0
        whole = False
        refusal: PlaitError | None = None

        async def counted() -> Message:
            nonlocal taken, whole, refusal
            try:
                if whole:
                    return await receive()  # waits for the end of the connection, if need be
                if max(declared, taken) > bound.most:
                    raise _too_large(max(declared, taken), bound.most)
                message = await self._next(receive)
                taken += len(message.get("body", b""))
                if taken > bound.most:
                    raise _too_large(taken, bound.most)
            except PlaitError as error:
                refusal = error
                raise
            whole = not message.get("more_body", False)
            return message

        async def unless_refused(message: Message) -> None:
            # Frameworks take a failed read for a malformed body; what they answer isn't the reason.
            if refusal is None:
                await send(message)

        await self._app(scope, counted, unless_refused)
        if refusal is not None:
            raise refusal

    async def _next(self, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(self._idle_seconds):
                return await receive()
        except TimeoutError as error:
            raise RequestRejected(
                f"nothing of the body arrived for {self._idle_seconds:g} seconds",
                remedy="send it again",
            ) from error


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


def _declared(headers: Mapping[str, str]) -> int:
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit()):
        raise RequestRejected(f"Content-Length {text[:40]!r} is not a number")
    length = int(text[:20])
    if length > BODY_BYTES_MAX:
        raise _too_large(length, BODY_BYTES_MAX)
    return length


def _too_large(size: int, most: int) -> LimitExceeded:
    return LimitExceeded(f"request body of {size} bytes or more; at most {most} here")


def _unforeseen(request_id: str) -> ServiceError:
    return ServiceError(
        "the registry met an error that it didn't foresee",
        remedy=f"its log has the cause under request {request_id}",
    )
