"""Connections and transactions: what SQLite and PostgreSQL need in order to keep their promises."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DBAPIError,
    InterfaceError,
    OperationalError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from plait.errors import NoSpace, PlaitError, RegistryUnavailable, ServiceError, UsageError

_WRITES: Final = "plait_writes"
_BUSY_SECONDS: Final = 10
_POOL: Final = 48  # more than there are worker threads, so that nobody waits for a connection
_NO_SPACE: Final = ("database or disk is full", "No space left on device", "could not extend file")


class Database:
    """An engine whose transactions either read or write, and whose errors are plait's.

    SQLite: WAL, synchronous=FULL, foreign keys on; a writer takes the write lock at once (a
    transaction that reads first and writes later fails under contention, whatever its timeout).
    PostgreSQL: READ COMMITTED; compare-and-set and row locks do the rest.
    """

    def __init__(self, url: str) -> None:
        """Prepares the engine; connects to nothing yet.

        Raises:
            UsageError: not the URL of a SQLite or PostgreSQL database.
        """
        self.url = parse_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.engine = _sqlite_engine(self.url) if self.is_sqlite else _postgresql_engine(self.url)
        # Within this process writers queue fairly; SQLite's own waiting is by polling.
        self._writers = threading.Lock() if self.is_sqlite else None

    @property
    def where(self) -> str:
        """The URL without its password."""
        return self.url.render_as_string(hide_password=True)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads: on SQLite one snapshot."""
        with self._translated(), self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that commits if the block ends, and leaves nothing if it raises."""
        with self._translated(), self._turn(), self.engine.connect() as connection:
            connection = connection.execution_options(**{_WRITES: True})
            with connection.begin():
                yield connection

    def close(self) -> None:
        self.engine.dispose()

    def _turn(self) -> AbstractContextManager[Any]:
        return self._writers or nullcontext()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except PoolTimeout as error:
            raise RegistryUnavailable("every database connection is busy") from error
        except DBAPIError as error:
            meaning = self._meaning(error)
            if meaning is None:
                raise
            raise meaning from error

    def _meaning(self, error: DBAPIError) -> PlaitError | None:
        """For a database that is full, locked, away or damaged; None for a mistake here."""
        text = str(error.orig)
        if any(phrase in text for phrase in _NO_SPACE):
            return NoSpace(f"the database {self.where} is full: {text}", remedy="free disk space")
        if isinstance(error, (OperationalError, InterfaceError)) or error.connection_invalidated:
            return RegistryUnavailable(f"the database {self.where} doesn't answer: {text.strip()}")
        if self.is_sqlite and type(error) is DatabaseError:  # SQLITE_CORRUPT, SQLITE_NOTADB
            return ServiceError(
                f"the database {self.where} is damaged, or is none: {text}",
                remedy="restore a backup, or name another file",
            )
        return None


def parse_url(text: str) -> URL:
    """A SQLAlchemy URL with the driver that plait uses.

    Raises:
        UsageError: no URL, or of another database.
    """
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise UsageError(f"{text[:80]!r} is no database URL") from error
    if url.get_backend_name() == "sqlite":
        return url.set(drivername="sqlite")
    if url.get_backend_name() in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    raise UsageError(
        f"database {url.render_as_string(hide_password=True)}: expected sqlite:/// or postgresql://"
    )


def database_file(text: str) -> Path | None:
    """The file of a SQLite database; None for another one, or one in memory."""
    url = parse_url(text)
    in_file = url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:")
    return Path(str(url.database)) if in_file else None


def _sqlite_engine(url: URL) -> Engine:
    engine = create_engine(
        url,
        connect_args={"timeout": _BUSY_SECONDS, "check_same_thread": False},
        pool_size=_POOL,
        max_overflow=_POOL,
        pool_timeout=_BUSY_SECONDS,
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver must not begin transactions by itself
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _postgresql_engine(url: URL) -> Engine:
    return create_engine(
        url,
        isolation_level="READ COMMITTED",
        pool_pre_ping=True,  # survives a restart of the database
        pool_size=10,
        max_overflow=_POOL - 10,
        pool_timeout=_BUSY_SECONDS,
        connect_args={
            "connect_timeout": _BUSY_SECONDS,
            "options": f"-c lock_timeout={_BUSY_SECONDS}s -c statement_timeout=30s",
        },
    )
