"""Running the registry as a process: sockets, signals, a quick end."""

import contextlib
import logging
import signal
import socket
import sys
from types import FrameType
from typing import Final

import uvicorn

from plait.errors import UsageError
from plait.store import open_store
from plait_server.app import create_app
from plait_server.catalog import SqlCatalog, database_file
from plait_server.catalog.locking import require_locking
from plait_server.registry import Registry
from plait_server.settings import Settings

_log: Final = logging.getLogger("plait.server")

# Waiters are ended at once; this is for transfers that are under way.
_GRACE_SECONDS: Final = 3


class Server(uvicorn.Server):
    """uvicorn, which says where it serves, and ends the waits when it is told to stop.

    (uvicorn waits for open connections before it shuts the application down; watchers would keep
    it for ever.)
    """

    def __init__(self, config: uvicorn.Config, registry: Registry, url: str) -> None:
        super().__init__(config)
        self._registry = registry
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            print(f"plait: serving on {self._url}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._registry.watch.stop_soon()
        super().handle_exit(sig, frame)


def serve(settings: Settings) -> None:
    """Opens database and store, and serves until SIGTERM or Ctrl-C.

    Raises:
        UsageError: a database, folder or address that can't be used.
        PlaitError: the database or the store doesn't answer.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    prepare(settings)
    listener = _listen(settings.host, settings.port)
    with listener:
        store = open_store(settings.store_url, settings.store_options)
        store.check()
        catalog = SqlCatalog(settings.database)
        app = create_app(settings, catalog=catalog, store=store)
        port = listener.getsockname()[1]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        if settings.token is None and not _is_loopback(settings.host):
            _log.warning("anybody who reaches port %d may commit: set PLAIT_TOKEN", port)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            # Followers poll at intervals of up to a minute over one connection.
            timeout_keep_alive=75,
        )
        _log.info("database %s, objects %s", catalog.where, store.url)
        server = Server(config, app.state.registry, f"http://{host}:{port}")
        # uvicorn raises the signal again once it has shut down; that was all.
        signal.signal(signal.SIGTERM, _leave)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    if not server.started:
        sys.exit(1)


def prepare(settings: Settings) -> None:
    """Makes the data folder, if anything is to lie there, and looks whether SQLite can work.

    Raises:
        UsageError: it can't, and why.
    """
    folders = [] if settings.store else [settings.data]
    file = database_file(settings.database)
    if file is not None:
        folders.append(file.parent)
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"can't make the folder {folder}: {error}") from error
    if file is not None:
        require_locking(file.parent)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise UsageError(
            f"can't listen on {host} port {port}: {error.strerror or error}",
            remedy="choose another --port (0 takes a free one)",
        ) from error


def _leave(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
