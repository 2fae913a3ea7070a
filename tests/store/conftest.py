"""Stores to test, each empty, and an S3 server for the session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.store import FsspecStore, LocalStore, MemoryStore, Store

from .faulty_proxy import Proxy, faulty_proxy
from .s3_server import make_bucket, options_for, s3_server


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def s3_url(s3_port: int) -> str:
    """The URL of a new bucket, with a prefix in it."""
    return f"s3://{make_bucket(s3_port)}/policies/weights"


@pytest.fixture
def proxy(s3_port: int) -> Iterator[Proxy]:
    with faulty_proxy(s3_port) as running:
        yield running


@pytest.fixture(params=["memory", "local", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "local":
        return LocalStore(tmp_path / "store")
    port = request.getfixturevalue("s3_port")
    return FsspecStore(request.getfixturevalue("s3_url"), options_for(port))
