"""An S3 server on this machine: moto over HTTP, in a process of its own."""

import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# It ends when its standard input does, so it can't outlive the tests.
_SERVE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server() -> Iterator[int]:
    """The port of a running S3 server."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def make_bucket(port: int) -> str:
    name = f"plait-{uuid.uuid4().hex}"
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{name}", method="PUT")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
    return name


def options_for(port: int, **more: Any) -> dict[str, Any]:
    """Storage options that lead to the server, with credentials that only a test takes."""
    return {
        "endpoint_url": f"http://127.0.0.1:{port}",
        "key": "test",
        "secret": "test",
        "client_kwargs": {"region_name": "us-east-1"},
        **more,
    }
