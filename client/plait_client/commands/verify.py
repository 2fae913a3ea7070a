"""`plait verify`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from plait_client.connection import connected
from plait_client.output import JsonOption, Output, human_bytes
from plait_client.refs import split_ref
from plait_client.verification import verify_folder, verify_stored


def register(app: typer.Typer) -> None:
    app.command("verify")(verify_command)


def verify_command(
    ref: Annotated[str, typer.Argument(metavar="P[@REF]")],
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Check this folder's weights instead.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check stored bytes, digests and fingerprint sums; with DIR, every weight there."""
    output = Output(as_json=json)
    policy, to = split_ref(ref)
    with connected() as client, output.progress() as progress:
        version = client.version(policy, to)
        if directory is None:
            found = verify_stored(client, version, progress)
        else:
            found = verify_folder(directory, version)
    output.document(
        {
            "policy": policy,
            "seq": version.seq,
            "fingerprint": version.fingerprint,
            "ok": True,
            "directory": None if directory is None else str(directory),
            **asdict(found),
        }
    )
    if directory is None:
        output.line(
            f"{policy}@{version.seq} is whole: {found.manifests} manifests, {found.chunks} chunks, "
            f"{human_bytes(found.stored_bytes)}"
        )
    else:
        output.line(f"{directory} holds {policy}@{version.seq}: {found.weights:,} elements read")
