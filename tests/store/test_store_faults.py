"""Errors of cloud libraries, told apart; the libraries that aren't here are played by classes."""

import errno
from collections.abc import Callable

import pytest

from plait.store import faults


def named(name: str, **attributes: object) -> Exception:
    """An exception whose class has the given module and name."""
    module, _, last = name.rpartition(".")
    error = type(last, (Exception,), {"__module__": module})("as the library words it")
    for key, value in attributes.items():
        setattr(error, key, value)
    assert isinstance(error, Exception)
    return error


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EBUSY, "Please reduce your request rate."),
        OSError(errno.EREMOTEIO, "We encountered an internal error."),
        ConnectionResetError(),
        TimeoutError(),
        caused(ValueError("wrapped"), BrokenPipeError()),
        named("gcsfs.retry.HttpError", code=503),
        named("gcsfs.retry.HttpError", code=429),
        named("azure.core.exceptions.HttpResponseError", status_code=503),
        named("azure.core.exceptions.ServiceRequestError"),
        named("botocore.exceptions.ConnectionError"),
        named("aiohttp.client_exceptions.ClientError"),
    ],
)
def test_throttling_and_broken_connections_pass(error: Exception) -> None:
    assert faults.is_passing(error)
    assert not faults.may_be_credentials(error)


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("denied"),
        OSError(errno.EINVAL, "no such thing"),
        named("gcsfs.retry.HttpError", code=400),
        ValueError("a mistake in the call"),
    ],
)
def test_what_stays_wrong_does_not_pass(error: Exception) -> None:
    assert not faults.is_passing(error)


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("The provided token has expired."),
        caused(OSError(errno.EIO, "x"), named("b.E", response={"Error": {"Code": "ExpiredToken"}})),
        caused(
            OSError(errno.EINVAL, "Bad Request"), named("b.E", response={"Error": {"Code": "400"}})
        ),
        named("gcsfs.retry.HttpError", code=401),
        named("google.auth.exceptions.RefreshError"),
        named("azure.core.exceptions.ClientAuthenticationError", status_code=403),
    ],
)
def test_expired_and_denied_may_be_the_credentials(error: Exception) -> None:
    assert faults.may_be_credentials(error)
    assert not faults.is_passing(error)


@pytest.mark.parametrize(
    ("told", "error"),
    [
        (faults.is_full, OSError(errno.ENOSPC, "full")),
        (faults.is_full, named("b.E", response={"Error": {"Code": "XMinioStorageFull"}})),
        (faults.is_full, named("azure.core.exceptions.HttpResponseError", status_code=507)),
        (faults.is_range_beyond, named("b.E", response={"Error": {"Code": "InvalidRange"}})),
        (faults.is_range_beyond, named("gcsfs.retry.HttpError", code=416)),
        (faults.is_bucket_missing, named("b.E", response={"Error": {"Code": "NoSuchBucket"}})),
    ],
)
def test_other_answers_are_told_by_code_or_status(
    told: Callable[[BaseException], bool], error: Exception
) -> None:
    assert told(error)
    assert not told(ValueError("another"))
