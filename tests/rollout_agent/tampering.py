"""A client's way to the registry, with somebody in the middle."""

from collections.abc import Callable

import httpx

from plait_client.registry import RegistryClient

# Gets the request and the way on; answers in its own words or passes the request on.
Middle = Callable[[httpx.Request, Callable[[], httpx.Response]], httpx.Response]


class Tampering(httpx.BaseTransport):
    def __init__(self, middle: Middle) -> None:
        self.middle = middle
        self._inner = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self.middle(request, lambda: self._inner.handle_request(request))

    def close(self) -> None:
        self._inner.close()


def client_through(url: str, middle: Middle) -> RegistryClient:
    return RegistryClient(url, transport=Tampering(middle), attempts=1, timeout=5.0)


def is_chunk(request: httpx.Request) -> bool:
    return request.method == "GET" and request.url.path.startswith("/v1/chunks/")


def is_channel(request: httpx.Request) -> bool:
    return request.method == "GET" and "/channels/" in request.url.path
