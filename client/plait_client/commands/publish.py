"""`plait publish`."""

from pathlib import Path
from typing import Annotated

import typer

from plait.errors import UsageError
from plait.wire import VersionDocument
from plait_client.connection import actor, connected, fetcher_of
from plait_client.output import JsonOption, Output, human_bytes
from plait_client.publish import Mode, Request, publish


def register(app: typer.Typer) -> None:
    app.command("publish")(publish_command)


def publish_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of .safetensors files.")],
    policy: Annotated[str, typer.Option("--policy", help="The line of weights to publish to.")],
    channel: Annotated[str, typer.Option(help="The channel to move.")] = "main",
    base: Annotated[
        Path | None, typer.Option(help="Folder with the base's weights; else the local mirror.")
    ] = None,
    external: Annotated[
        bool, typer.Option("--external", help="An anchor whose bytes both sides already hold.")
    ] = False,
    new_anchor: Annotated[
        bool, typer.Option("--new-anchor", help="Send all weights: for a new layout, say.")
    ] = False,
    message: Annotated[str, typer.Option(help="Kept with the version.")] = "",
    grain: Annotated[
        int, typer.Option(help="Shares that an engine's ranks can fetch apart; 1: one for all.")
    ] = 1,
    json: JsonOption = False,
) -> None:
    """Publish a checkpoint folder: the first time whole, then what changed since the head."""
    if external and new_anchor:
        raise UsageError("--external and --new-anchor exclude each other")
    mode: Mode = "external" if external else "anchor" if new_anchor else "delta"
    request = Request(directory, policy, channel, base, mode, message, actor(), grain)
    output = Output(as_json=json)
    with connected() as client, output.progress() as progress:
        version = publish(request, fetcher_of(client), progress=progress)
    output.document(version)
    output.line(_summary(version))


def _summary(version: VersionDocument) -> str:
    head = f"{version.policy}@{version.seq} ({version.channel}, generation {version.generation})"
    if version.kind == "anchor":
        what = "external anchor" if version.external else "anchor"
        return f"{head}: {what} of {human_bytes(version.dense_bytes)}"
    share = version.changed_elements / max(version.total_elements, 1)
    return (
        f"{head}: {version.changed_elements:,} of {version.total_elements:,} elements changed "
        f"({share:.3%}), {human_bytes(version.payload_bytes)} to fetch, "
        f"{version.dense_bytes / max(version.payload_bytes, 1):,.0f}x smaller than dense"
    )
