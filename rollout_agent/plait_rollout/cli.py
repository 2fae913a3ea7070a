"""`plait follow`: keeps an engine or a directory at a channel's head."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.errors import ServiceError, UsageError
from plait_client.connection import connected, fetcher_of
from plait_client.output import JsonOption, Output
from plait_client.progress import SILENT, Progress
from plait_client.refs import usable_name
from plait_rollout.status import Status

if TYPE_CHECKING:
    from plait_rollout.follower import Follower


class Mode(StrEnum):
    """How an engine's weights are moved."""

    in_place = "in-place"
    reload = "reload"


def register(app: typer.Typer) -> None:
    app.command("follow")(follow_command)


def follow_command(
    policy: Annotated[str, typer.Argument(metavar="P")],
    channel: Annotated[str, typer.Option(help="Which channel to follow.")] = "main",
    engine: Annotated[str | None, typer.Option(help="Address of a live SGLang engine.")] = None,
    mode: Annotated[Mode, typer.Option(help="Change live weights, or load anew.")] = Mode.in_place,
    spool: Annotated[
        Path | None, typer.Option(help="Folder shared with the engine (its PLAIT_SPOOL).")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Follow with a checkout instead.")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="Checkpoint to begin with; an external line needs it once.")
    ] = None,
    no_reload: Annotated[
        bool, typer.Option("--no-reload", help="Refuse what can't be done in place.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Name in the fleet.")] = None,
    location: Annotated[str, typer.Option(help="Where it is, for the fleet.")] = "",
    listen: Annotated[
        str | None, typer.Option(metavar="[HOST:]PORT", help="Serve the local API there.")
    ] = None,
    allowed_lag: Annotated[
        int | None, typer.Option(min=0, help="Ready while at most so many versions behind.")
    ] = None,
    verify_every: Annotated[
        float | None, typer.Option(min=1, help="Seconds between full re-reads of the weights.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Catch up with the head, and leave.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Keep a live engine, or a directory, at a channel's head; every move is proven bit for bit."""
    # What drives engines is slow to import, and `plait --help` must not be.
    from plait_client.cache import default_cache_root
    from plait_rollout.assembly import Target, replica_of
    from plait_rollout.follower import Follower, FollowOptions

    output = Output(as_json=json)
    target = Target(engine, mode.value, spool, directory, base, reloads=not no_reload)
    name = usable_name(name or target.name, "replica")
    usable_name(policy, "policy")
    usable_name(channel, "channel")
    options = FollowOptions(allowed_lag=allowed_lag, verify_seconds=verify_every, location=location)
    with connected() as client, _progress(output, shown=once) as progress:
        fetcher = fetcher_of(client)
        replica = replica_of(target, fetcher, progress=progress)
        follower = Follower(
            fetcher,
            replica,
            policy=policy,
            channel=channel,
            name=name,
            memory=default_cache_root() / "follow" / f"{policy}.{channel}.{name}.json",
            options=options,
            # What `--once` can't do is said as the command's own error.
            on_change=lambda status: None if once and status.error else _show(status, output),
        )
        try:
            status = _once(follower) if once else _until_signal(follower, listen)
        finally:
            replica.close()
    output.document(status.to_document())


def _once(follower: "Follower") -> Status:
    try:
        return follower.catch_up()
    finally:
        follower.stop()


def _until_signal(follower: "Follower", listen: str | None) -> Status:
    """Follows until SIGINT or SIGTERM, and then ends after the move that it is in."""
    stop = threading.Event()
    with _on_signals(stop), _local_api(follower, listen):
        follower.start()
        # An Event without a timeout would hold back the signals' handlers.
        while not stop.wait(0.5):
            if not follower.is_following:
                raise ServiceError("the follower ended by an unexpected error, said above")
        follower.stop(wait=False)
    return follower.status()


@contextmanager
def _on_signals(stop: threading.Event) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: stop.set()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _local_api(follower: "Follower", listen: str | None) -> Iterator[None]:
    if listen is None:
        yield
        return
    from plait_rollout.local_api import LocalApi

    host, _, port = listen.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) <= 5) or int(port) > 65535:
        raise UsageError(f"--listen {listen!r} isn't [HOST:]PORT")
    with LocalApi(follower, host=host or "127.0.0.1", port=int(port)) as api:
        sys.stderr.write(f"local API at {api.url}\n")
        yield


@contextmanager
def _progress(output: Output, *, shown: bool) -> Iterator[Progress]:
    if not shown:
        yield SILENT
        return
    with output.progress() as progress:
        yield progress


def _show(status: Status, output: Output) -> None:
    """One line for a move on standard output; one for trouble on standard error."""
    if status.error:
        remedy = f" ({status.remedy})" if status.remedy else ""
        serves = "nothing proven" if status.seq is None else f"version {status.seq}"
        sys.stderr.write(f"{status.error_code}: {status.error}{remedy}; serving {serves}\n")
        return
    took = ", ".join(
        f"{step} {status.durations[step]:.3f}"
        for step in ("fetch", "stage", "pause", "reload", "checkout", "total")
        if step in status.durations
    )
    changed = "" if status.changed_elements is None else f", {status.changed_elements:,} changed"
    fallback = f" [{status.fallback}]" if status.fallback else ""
    output.line(
        f"{status.policy}@{status.seq} generation {status.generation}{changed} "
        f"(seconds: {took}){fallback}"
    )
