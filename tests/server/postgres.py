"""A real PostgreSQL server for tests: system binaries, a temporary folder, trust, no fsync.

Use it from any room: `from tests.server.postgres import postgres_server`. It won't run as root, so
root runs it as `postgres` or `nobody`.
"""

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

_START_SECONDS = 60.0


class PostgresServer:
    """A running server, and databases made on it by demand."""

    def __init__(self, port: int) -> None:
        self.port = port

    def new_database(self) -> str:
        """URL of a new, empty database."""
        name = f"plait_{secrets.token_hex(6)}"
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return self._url(name)

    def drop_database(self, url: str) -> None:
        name = url.rpartition("/")[2]
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'.encode())

    def _url(self, database: str) -> str:
        return f"postgresql://plait@127.0.0.1:{self.port}/{database}"


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Starts a server and stops it again, by its pid."""
    binaries = _binaries()
    folder = Path(tempfile.mkdtemp(prefix="plait-postgres-"))
    user = _unprivileged()
    if user is not None:
        os.chown(folder, user.pw_uid, user.pw_gid)
        folder.chmod(0o700)
    port = _free_port()
    data, log = folder / "data", folder / "log"
    try:
        _run(
            user,
            [
                binaries / "initdb", "-D", data, "-U", "plait", "--auth=trust",
                "--no-sync", "--no-instructions", "-E", "UTF8", "--no-locale",
            ],
        )  # fmt: skip
        command = [
            binaries / "postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", "",
            "-c", "fsync=off", "-c", "shared_buffers=32MB", "-c", "max_connections=200",
        ]  # fmt: skip
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdout=output, stderr=output, cwd=folder, **_as(user),
            )  # fmt: skip
        try:
            _wait_until_it_answers(process, port, log)
            yield PostgresServer(port)
        finally:
            process.send_signal(signal.SIGINT)  # fast shutdown
            process.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _binaries() -> Path:
    found = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, check=False)
    candidates = [Path(found.stdout.strip())] if found.returncode == 0 else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in candidates:
        if (folder / "initdb").exists():
            return folder
    raise RuntimeError("no PostgreSQL server binaries: apt-get install postgresql")


def _unprivileged() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return pwd.getpwnam("postgres" if "postgres" in names else "nobody")


def _as(user: pwd.struct_passwd | None) -> dict[str, object]:
    if user is None:
        return {}
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _run(user: pwd.struct_passwd | None, command: list[object]) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, cwd="/", check=False, **_as(user))  # type: ignore[call-overload]
    if done.returncode:
        raise RuntimeError(f"{words[0]} failed: {done.stderr}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_until_it_answers(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            psycopg.connect(f"postgresql://plait@127.0.0.1:{port}/postgres").close()
            return
        except psycopg.OperationalError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL doesn't start: {log.read_text()}") from error
            time.sleep(0.05)
