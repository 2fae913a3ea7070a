"""`plait checkout`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from plait_client.checkout import checkout
from plait_client.connection import connected, fetcher_of
from plait_client.output import JsonOption, Output, counted, human_bytes


def register(app: typer.Typer) -> None:
    app.command("checkout")(checkout_command)


def checkout_command(
    ref: Annotated[str, typer.Argument(metavar="P[@REF]", help="Policy, and which version.")],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="New, empty, or a checkout to be moved.")
    ],
    base: Annotated[
        Path | None, typer.Option(help="Folder to begin with; an external line needs it once.")
    ] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Replace what DIR holds instead of moving it.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Make a folder hold any version; a checkout is moved there by deltas, in place."""
    output = Output(as_json=json)
    with connected() as client, output.progress() as progress:
        result = checkout(
            client,
            ref,
            directory,
            base=base,
            fetcher=fetcher_of(client),
            progress=progress,
            rebuild=rebuild,
        )
    output.document(
        {
            **asdict(result.version),
            "directory": str(directory),
            "way": result.way,
            "steps": result.steps,
            "fetched_bytes": result.fetched_bytes,
            "repaired": result.repaired,
        }
    )
    if result.repaired:
        output.line("repaired what a killed run had left unfinished")
    output.line(
        f"{directory} holds {result.version.policy}@{result.version.seq} ({result.way}, "
        f"{counted(result.steps, 'step')}, {human_bytes(result.fetched_bytes)})"
    )
