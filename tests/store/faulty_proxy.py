"""An HTTP proxy in front of an S3 server that does to requests what networks and clouds do."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Fault = Literal["slow_down", "reset", "lose_answer", "cut_upload", "cut_download"] | None

_HOP_HEADERS = {"connection", "transfer-encoding", "content-length", "keep-alive"}


@dataclass
class Proxy:
    """Attributes:
    faults: what happens to the next requests, in order of arrival; later ones are passed on.
    only: methods that faults apply to; empty for all.
    expired_key: an access key whose requests are refused with ExpiredToken.
    requests: method and path of each that arrived.
    """

    target: int
    faults: list[Fault] = field(default_factory=list)
    only: frozenset[str] = frozenset()
    expired_key: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    port: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_fault(self, method: str, path: str) -> Fault:
        with self.lock:
            self.requests.append((method, path))
            if self.faults and (not self.only or method in self.only):
                return self.faults.pop(0)
            return None


@contextmanager
def faulty_proxy(target: int) -> Iterator[Proxy]:
    proxy = Proxy(target)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    proxy.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def do_GET(self) -> None:
        self.serve()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - http.server calls by name

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.proxy.next_fault(self.command, self.path)
        if fault == "slow_down":
            self.refuse(503, "SlowDown", "Please reduce your request rate.")
            return
        if fault == "reset":
            self.hang_up()
            return
        expired = self.proxy.expired_key
        if expired and f"Credential={expired}/" in self.headers.get("Authorization", ""):
            self.refuse(400, "ExpiredToken", "The provided token has expired.")
            return
        status, headers, answer = self.forward(body[:-1] if fault == "cut_upload" else body)
        if fault == "lose_answer":
            self.hang_up()
            return
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in _HOP_HEADERS or (
                self.command == "HEAD" and name.lower() == "content-length"
            ):
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if fault == "cut_download":
            self.wfile.write(answer[: len(answer) // 2])
            self.hang_up()
            return
        self.wfile.write(answer)

    def forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        onward = http.client.HTTPConnection("127.0.0.1", self.proxy.target, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_HEADERS}
        headers.pop("Expect", None)
        try:
            onward.request(self.command, self.path, body=body, headers=headers)
            answer = onward.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            onward.close()

    def refuse(self, status: int, code: str, message: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        body = b"" if self.command == "HEAD" else text
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass
