"""`plait demo`."""

import os
import signal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.errors import NotInstalledError
from plait_client.output import JsonOption, Output

_FILE_WIDTH = 160
_MODEL = typer.Option(envvar="MODEL", help="A small real model, or a random one in seconds.")
_NO_ENGINE = typer.Option("--no-engine", envvar="NO_ENGINE", help="Torch modules, not SGLang.")
_CACHE = typer.Option(help="Keeps the converted model between runs.")
_FOLDER = typer.Option(help="For this run's database, objects and logs.")

if TYPE_CHECKING:
    from rich.console import Console


class Model(StrEnum):
    """The base model."""

    smollm2 = "smollm2"
    tiny = "tiny"


def register(app: typer.Typer) -> None:
    """Adds `plait demo`."""
    app.command("demo")(demo_command)


def demo_command(
    model: Annotated[Model, _MODEL] = Model.smollm2,
    no_engine: Annotated[bool, _NO_ENGINE] = False,
    cache: Annotated[Path, _CACHE] = Path(".cache/plait-demo"),
    folder: Annotated[Path, _FOLDER] = Path(".demo"),
    json: JsonOption = False,
) -> None:
    """A real reinforcement-learning loop into two live engines, with every claim proven."""
    # The trainer shares its cores with the engines: a thread that waits must not spin. Read by
    # OpenMP when torch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Typer's help must not wait for torch, nor be lost where it isn't installed.
    try:
        from plait_demo.quiet import quiet_libraries

        # First: some of what it says is read as a library is imported.
        quiet_libraries()
        from plait_demo.run import run_demo
    except ModuleNotFoundError as error:
        raise NotInstalledError(
            f"`plait demo` needs {error.name}", remedy="pip install 'plait[demo]'"
        ) from error
    # The same tidy end for a terminated demo as for one that Ctrl-C ends.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    summary = run_demo(
        model.value,
        sglang=not no_engine,
        cache=cache,
        folder=folder,
        console=_console(stderr=json),
    )
    Output(as_json=json).document(summary)
    if not summary["passed"]:
        raise typer.Exit(1)


def _console(*, stderr: bool) -> "Console":
    """As wide as it needs to be where nobody's terminal is the limit."""
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=_FILE_WIDTH)
