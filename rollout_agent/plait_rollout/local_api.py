"""A small HTTP API beside the engine: which version it serves, and "go there".

    GET  /version                      what is served: seq, stamp, fingerprint; null if unproven
    GET  /ready                        200 if the replica may get traffic, 503 if not
    GET  /status                       everything that the follower knows about itself
    POST /goto     {"ref": "41"}       go to exactly this version, and stay there; a channel's own
                                       name follows it again
    POST /at-least {"seq": 41, "timeout": 60}    answer when this version or a later one is served
    POST /max-lag  {"versions": 2}     answer when at most so many versions behind the head

Answers are JSON. Errors are problem documents (RFC 9457) with the codes of plait's errors, as the
registry sends them. It has no tokens: it listens on the loopback address unless told otherwise.
"""

import json
import logging
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from plait.errors import LimitExceeded, NotFound, PlaitError, UsageError
from plait.limits import INTEGER_MAX
from plait.wire import problem_of
from plait.wire.problem import MEDIA_TYPE
from plait_rollout.follower import Follower

_BODY_BYTES_MAX: Final = 4096
_DISCARDED_BYTES_MAX: Final = 1 << 20
_SOCKET_SECONDS: Final = 30.0  # a client that sends nothing is let go
_SERVED: Final = (
    "policy", "channel", "seq", "generation", "stamp", "fingerprint", "layout_digest",
    "lag_versions",
)  # fmt: skip

_logger = logging.getLogger(__name__)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class GoTo(_Body):
    """Body of /goto."""

    ref: Annotated[str, Field(min_length=1, max_length=256)]


class AtLeast(_Body):
    """Body of /at-least."""

    seq: Annotated[int, Field(ge=1, le=INTEGER_MAX)]
    timeout: Annotated[float, Field(ge=0, le=3600)] = 60.0


class MaxLag(_Body):
    """Body of /max-lag."""

    versions: Annotated[int, Field(ge=0, le=INTEGER_MAX)]


class LocalApi:
    """Serves a follower's local API in a thread.

    Args:
        port: 0 takes a free one; `url` says which.
    Raises:
        UsageError: the address can't be listened on.
    """

    def __init__(self, follower: Follower, *, host: str = "127.0.0.1", port: int = 0) -> None:
        try:
            self._server = _Server((host, port), _Handler, follower)
        except OSError as error:
            raise UsageError(f"can't listen on {host}:{port}: {error}") from error
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def start(self) -> None:
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, name="plait-local-api", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Listens no longer. Requests under way are left to end by themselves."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        follower: Follower,
    ) -> None:
        super().__init__(address, handler)
        self.follower = follower


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _SOCKET_SECONDS

    def do_GET(self) -> None:
        self._answer(self._read)

    def do_POST(self) -> None:
        self._answer(self._act)

    def _read(self) -> tuple[int, dict[str, Any]]:
        status = self.server.follower.status().to_document()
        match self.path:
            case "/version":
                return HTTPStatus.OK, {name: status[name] for name in _SERVED}
            case "/ready":
                code = HTTPStatus.OK if status["ready"] else HTTPStatus.SERVICE_UNAVAILABLE
                shown = ("ready", "phase", "seq", "head_seq", "lag_versions", "error_code")
                return code, {name: status[name] for name in shown}
            case "/status":
                return HTTPStatus.OK, status
        raise NotFound(f"no such path: {self.path[:200]}")

    def _act(self) -> tuple[int, dict[str, Any]]:
        body, follower = self._body(), self.server.follower
        try:
            match self.path:
                case "/goto":
                    status = follower.go_to(GoTo.model_validate_json(body).ref)
                case "/at-least":
                    wanted = AtLeast.model_validate_json(body)
                    status = follower.at_least(wanted.seq, timeout=wanted.timeout)
                case "/max-lag":
                    status = follower.max_lag(MaxLag.model_validate_json(body).versions)
                case _:
                    raise NotFound(f"no such path: {self.path[:200]}")
        except ValidationError as error:
            raise UsageError(f"{self.path}: {str(error)[:400]}") from error
        document = status.to_document()
        return HTTPStatus.OK, {name: document[name] for name in _SERVED}

    def _body(self) -> bytes:
        size = self.headers.get("Content-Length", "0")
        if not size.isascii() or not size.isdigit() or int(size) > _BODY_BYTES_MAX:
            self.close_connection = True
            if size.isascii() and size.isdigit():
                # Closing on unread bytes would reset the connection before the answer is read.
                self.rfile.read(min(int(size), _DISCARDED_BYTES_MAX))
            raise LimitExceeded(f"a body of {size[:20]} bytes; at most {_BODY_BYTES_MAX}")
        return self.rfile.read(int(size))

    def _answer(self, work: Callable[[], tuple[int, dict[str, Any]]]) -> None:
        media = "application/json"
        try:
            code, document = work()
        except PlaitError as error:
            problem = problem_of(error, instance=self.path[:200])
            code, document, media = problem.status, problem.model_dump(), MEDIA_TYPE
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", media)
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")  # or a client would reuse it
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (http.server's name)
        _logger.debug(format, *args)
