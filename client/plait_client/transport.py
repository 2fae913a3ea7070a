"""HTTP to the registry: one request with its retries, and every httpx error turned into plait's.

Nothing of httpx leaves this file but the response. Only calls that are safe to repeat are repeated:
a bounded number of times, with jitter, and never sooner than `Retry-After` asks.
"""

import random
import time
from typing import Any, Final, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from plait.errors import (
    PlaitError,
    RegistryUnavailable,
    RequestRejected,
    ServiceError,
    UsageError,
)
from plait.wire import Problem, error_of
from plait_client.address import shown

ATTEMPTS: Final = 4
_BACKOFF_SECONDS: Final = 0.25
_BACKOFF_MOST: Final = 8.0
_RETRY_AFTER_MOST: Final = 30.0  # a registry that asks for more is away, as far as one call goes
_UNREADY: Final = frozenset({408, 425, 429, 502, 503, 504})

# No connection, so no byte of the request has left.
_NEVER_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)

Document = TypeVar("Document", bound=BaseModel)


class HttpTransport:
    """Requests to one registry. Safe to share between threads.

    Attributes:
        shown_url: its address as messages show it.
        timeout: seconds that the registry may be silent.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        timeout: float,
        transport: httpx.BaseTransport | None,
        attempts: int = ATTEMPTS,
    ) -> None:
        """Opens no connection yet.

        Raises:
            UsageError: `url` isn't an http or https address, the token isn't one, or the
                environment asks for a proxy or certificates that can't be used.
        """
        headers = {"User-Agent": "plait"}
        if token:
            headers["Authorization"] = f"Bearer {_sendable(token)}"
        self.shown_url = shown(url.rstrip("/"))
        self.timeout = timeout
        self._attempts = attempts
        try:
            address = httpx.URL(url.rstrip("/"))
            if address.scheme not in ("http", "https") or not address.host:
                raise _no_address(url)
            self._client = httpx.Client(
                base_url=address,
                headers=headers,
                timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)),
                transport=transport,
            )
        except (httpx.InvalidURL, ValueError) as error:
            # A part of the password may be what can't be read as a port or a host.
            raise _no_address(url, "" if "@" in url else str(error)) from error
        except (ImportError, OSError) as error:
            # httpx reads proxies (ALL_PROXY) and certificates (SSL_CERT_FILE) there.
            raise UsageError(
                f"the environment's proxy or certificates can't be used: {error}",
                remedy="look at ALL_PROXY, HTTPS_PROXY, HTTP_PROXY, SSL_CERT_FILE and SSL_CERT_DIR",
            ) from error

    def close(self) -> None:
        self._client.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        repeatable: bool = True,
        read_timeout: float | None = None,
        **content: Any,
    ) -> httpx.Response:
        """The response to one request, its body read; 304 counts as success.

        Args:
            repeatable: may be sent again after a lost answer. One that never left is always
                tried again.
            read_timeout: seconds to wait for bytes, if other than the client's.
            content: `params`, `headers`, `content` as httpx has them.

        Raises:
            RegistryUnavailable: no answer, or one that says "later", at every attempt. Its detail
                `sent` is False if the last one certainly never reached the registry.
            PlaitError: whatever the registry's problem document says.
        """
        for attempt in range(self._attempts):
            try:
                return self._once(method, path, read_timeout, content)
            except (RegistryUnavailable, ServiceError) as error:
                last = attempt == self._attempts - 1
                never_sent = error.details.get("sent") is False
                if last or not (_passing(error) and (repeatable or never_sent)):
                    raise
                time.sleep(_pause(attempt, error.details.get("retry_after")))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _once(
        self, method: str, path: str, read_timeout: float | None, content: dict[str, Any]
    ) -> httpx.Response:
        if read_timeout is not None:
            content = {**content, "timeout": httpx.Timeout(self.timeout, read=read_timeout)}
        try:
            response = self._client.request(method, path, **content)
        except httpx.HTTPError as error:
            raise RegistryUnavailable(
                f"no answer from the registry at {self.shown_url}: {_words(error)}",
                remedy="is it running, and is PLAIT_URL its address? This call may be repeated",
                sent=not isinstance(error, _NEVER_SENT),
            ) from error
        except httpx.InvalidURL as error:
            raise UsageError(f"{path!r} can't be part of an address: {error}") from error
        except RuntimeError as error:
            if not self._client.is_closed:
                raise
            raise UsageError(
                f"the client of {self.shown_url} is closed",
                remedy="close what uses a client (a publisher, a follower) before the client",
            ) from error
        if response.status_code >= 400:
            raise _refusal(response)
        if response.status_code >= 300 and response.status_code != 304:
            raise ServiceError(
                f"{self.shown_url} redirects {path} elsewhere: is it a plait registry?"
            )
        return response


def parsed(model: type[Document], response: httpx.Response) -> Document:
    """The response's body as a wire document.

    Raises:
        ServiceError: it is none; whatever answers there isn't a plait registry.
    """
    try:
        return model.model_validate_json(response.content)
    except ValidationError as error:
        raise ServiceError(
            f"{shown(str(response.request.url))} answered with something that isn't a "
            f"{model.__name__}: {str(error)[:400]}",
            remedy="is PLAIT_URL the address of a plait registry of this release?",
        ) from error


def _refusal(response: httpx.Response) -> PlaitError:
    """The error that a response of 400 and above stands for."""
    error = _problem(response)
    after = response.headers.get("Retry-After", "")
    if after.isascii() and after.isdigit() and len(after) < 10:
        error.details["retry_after"] = int(after)
    error.details["status"] = response.status_code
    return error


def _problem(response: httpx.Response) -> PlaitError:
    try:
        return error_of(Problem.model_validate_json(response.content))
    except ValidationError:
        # Not the registry's own words: a proxy's page, or another service.
        message = (
            f"{response.request.method} {shown(str(response.request.url))} answered "
            f"{response.status_code}"
        )
        if response.status_code in _UNREADY:
            return RegistryUnavailable(message)
        return (ServiceError if response.status_code >= 500 else RequestRejected)(message)


def _passing(error: PlaitError) -> bool:
    return error.retryable or int(error.details.get("status", 0)) >= 500


def _pause(attempt: int, retry_after: object) -> float:
    longest = min(_BACKOFF_SECONDS * 2**attempt, _BACKOFF_MOST)
    asked = min(float(retry_after), _RETRY_AFTER_MOST) if isinstance(retry_after, int) else 0.0
    # Jitter keeps a fleet that was cut off together from coming back together.
    return max(asked, random.uniform(longest / 2, longest))


def _no_address(url: str, why: str = "") -> UsageError:
    words = f"{shown(url)!r} isn't the address of a registry"
    return UsageError(
        f"{words}: {why}" if why else words,
        remedy="expected http(s)://HOST:PORT (PLAIT_URL)",
    )


def _words(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _sendable(token: str) -> str:
    """The token, if a header can carry it. The message doesn't show it: it is a secret."""
    if token.isascii() and token.isprintable() and " " not in token:
        return token
    raise UsageError(
        "the token (PLAIT_TOKEN) holds a space, a line's end or another character that none has",
        remedy="set it to the token alone",
    )
