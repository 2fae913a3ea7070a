"""What an exception out of a cloud storage library means.

The libraries raise errors of the operating system, of their HTTP client and of their own. They
are told apart by name, because none of these libraries need be installed.
"""

import errno
from collections.abc import Iterator
from typing import Any, Final

# OSErrors that s3fs makes of 503 SlowDown and 500 InternalError, and those of a broken connection.
_PASSING_NUMBERS: Final = frozenset(
    {
        errno.EBUSY,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.EPIPE,
        errno.EREMOTEIO,
        errno.ETIMEDOUT,
    }
)
_PASSING_NAMES: Final = frozenset(
    {
        "aiohttp.client_exceptions.ClientError",
        "azure.core.exceptions.ServiceRequestError",
        "azure.core.exceptions.ServiceResponseError",
        "botocore.exceptions.ConnectionError",
        "botocore.exceptions.HTTPClientError",
        "botocore.exceptions.IncompleteReadError",
        "botocore.parsers.ResponseParserError",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
        "urllib3.exceptions.IncompleteRead",
    }
)
_PASSING_STATUSES: Final = frozenset({408, 409, 429, 500, 502, 503, 504})

# 400 and 403 are all that a HEAD request says of an expired token.
_CREDENTIAL_CODES: Final = frozenset(
    {
        "400",
        "403",
        "AccessDenied",
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestExpired",
        "TokenRefreshRequired",
    }
)
_CREDENTIAL_NAMES: Final = frozenset(
    {
        "azure.core.exceptions.ClientAuthenticationError",
        "botocore.exceptions.CredentialRetrievalError",
        "botocore.exceptions.NoCredentialsError",
        "google.auth.exceptions.RefreshError",
    }
)


def is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed a moment later: throttling, resets, timeouts."""
    return any(
        isinstance(link, TimeoutError | ConnectionError)
        or (isinstance(link, OSError) and link.errno in _PASSING_NUMBERS)
        or _status(link) in _PASSING_STATUSES
        or not _PASSING_NAMES.isdisjoint(_names(link))
        for link in _chain(error)
    )


def may_be_credentials(error: BaseException) -> bool:
    """Whether new credentials might help: a token that expired, or access denied."""
    return any(
        isinstance(link, PermissionError)
        or _service_code(link) in _CREDENTIAL_CODES
        or _status(link) in {401, 403}
        or not _CREDENTIAL_NAMES.isdisjoint(_names(link))
        for link in _chain(error)
    )


def is_full(error: BaseException) -> bool:
    """Whether the store says that there is no room."""
    return any(
        (isinstance(link, OSError) and link.errno in {errno.ENOSPC, errno.EDQUOT})
        or _service_code(link) in {"QuotaExceeded", "XMinioStorageFull", "InsufficientCapacity"}
        or _status(link) == 507
        for link in _chain(error)
    )


def is_bucket_missing(error: BaseException) -> bool:
    """Whether the store says that it's the bucket, not an object, that doesn't exist."""
    codes = {"NoSuchBucket", "ContainerNotFound"}
    return any(_service_code(link) in codes for link in _chain(error))


def is_range_beyond(error: BaseException) -> bool:
    """Whether the store says that the object doesn't reach as far as the range asked for."""
    return any(
        _service_code(link) in {"InvalidRange", "416"} or _status(link) == 416
        for link in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what caused it."""
    while error is not None:
        yield error
        error = error.__cause__


def _names(error: BaseException) -> Iterator[str]:
    for each in type(error).__mro__:
        yield f"{each.__module__}.{each.__name__}"


def _service_code(error: BaseException) -> str:
    """The code in a botocore ClientError's answer, or in one of azure's."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        return str(response.get("Error", {}).get("Code", ""))
    return str(getattr(error, "error_code", None) or "")


def _status(error: BaseException) -> int:
    """The HTTP status that gcsfs (`code`), azure (`status_code`) or botocore answered with."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    else:
        status = getattr(error, "status_code", None) or getattr(error, "code", None) or 0
    return status if isinstance(status, int) else 0
