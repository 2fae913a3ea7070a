"""`plait doctor`: is everything in place here?"""

import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

import typer

import plait_client
from plait.errors import PlaitError, RegistryUnavailable
from plait.store import open_store
from plait_client.address import shown
from plait_client.cache import ChunkCache
from plait_client.connection import connected, registry_url
from plait_client.disk import disk_errors, write_atomically
from plait_client.output import JsonOption, Output, human_bytes
from plait_client.registry import RegistryClient

_SKEW_SECONDS_MAX: Final = 300  # cloud stores refuse requests signed by clocks further off


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor_command)


def doctor_command(json: JsonOption = False) -> None:
    """Check the registry's address, versions, clocks, the store and the cache."""
    output = Output(as_json=json)
    checks: list[dict[str, object]] = []
    failed: list[PlaitError] = []

    def check(name: str, look: Callable[[], str]) -> None:
        try:
            found = look()
        except PlaitError as error:
            failed.append(error)
            checks.append({"check": name, "ok": False, "found": str(error)})
        else:
            checks.append({"check": name, "ok": True, "found": found})

    check("cache", _cache)
    with connected() as client:
        check("registry", lambda: _registry(client))
        if not failed or not isinstance(failed[-1], RegistryUnavailable):
            check("clock", lambda: _clock(client))
            check("store", lambda: _store(client))
    output.document({"ok": not failed, "checks": checks})
    output.table(
        ("check", "", "found"),
        [(c["check"], "ok" if c["ok"] else "FAILED", c["found"]) for c in checks],
    )
    if failed:
        # The table has said it all; the exit code says it to programs.
        raise typer.Exit(max(error.exit_code for error in failed))


def _cache() -> str:
    cache = ChunkCache()
    with disk_errors(f"write the cache {cache.root}"):
        cache.root.mkdir(parents=True, exist_ok=True)
        probe = cache.root / f"probe-{os.getpid()}"
        write_atomically(probe, b"plait")
        probe.unlink()
        free = shutil.disk_usage(cache.root).free
    return f"{cache.root}: {human_bytes(cache.total_bytes())} held, {human_bytes(free)} free"


def _registry(client: RegistryClient) -> str:
    config = client.config()
    return f"{shown(registry_url())}: plait {config.version} (this is {plait_client.__version__})"


def _clock(client: RegistryClient) -> str:
    try:
        date = parsedate_to_datetime(client.clock())
    except ValueError:
        return "the registry sends no Date header"
    skew = abs((datetime.now(UTC) - date.astimezone(UTC)).total_seconds())
    if skew > _SKEW_SECONDS_MAX:
        raise PlaitError(
            f"clocks are {skew:.0f} s apart; at most {_SKEW_SECONDS_MAX}",
            remedy="set this machine's clock, or the registry's",
        )
    return f"{skew:.0f} s apart"


def _store(client: RegistryClient) -> str:
    direct = client.config().direct_store
    if direct is None:
        return "reached through the registry"
    store = open_store(direct)
    next(store.list("sha256/"), None)
    return f"{direct}: reached directly"
