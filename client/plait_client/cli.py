"""The `plait` command: the frame in which every package hangs its own subcommands.

A package registers them through the entry-point group `plait.commands` with a function
`register(app: typer.Typer) -> None`. One whose extra isn't installed stays on the command line and
says what to install.
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from io import TextIOWrapper
from typing import Any, Final, NoReturn

import typer
from typer._click.exceptions import ClickException

import plait_client
from plait.errors import NotInstalledError, PlaitError, UsageError
from plait_client.output import print_error

GROUP: Final = "plait.commands"

# What a package would have registered, for the day when it can't be imported.
_COMMANDS_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "server": ("serve",),
    "rollout": ("follow",),
    "demo": ("demo",),
}
_UNPARSED: Final = {"allow_extra_args": True, "ignore_unknown_options": True}


def build_app() -> typer.Typer:
    """The application with every package's commands."""
    app = typer.Typer(
        name="plait",
        help="Version control for reinforcement-learning policy weights.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)
    for entry_point in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        _register(app, entry_point)
    return app


def main() -> NoReturn:
    """Run the command line; leaves with its exit code.

    0 done, 1 failed, 2 wrong usage, 3 refused because something moved or doesn't match, 4 not
    reachable (safe to try again), 130 interrupted.
    """
    _open_closed_streams()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # A file's name may be bytes that no encoding has.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    as_json = "--json" in sys.argv[1:]
    try:
        code = build_app()(standalone_mode=False)
    except PlaitError as error:
        print_error(error, as_json=as_json)
        sys.exit(error.exit_code)
    except ClickException as error:
        if as_json:
            print_error(UsageError(error.format_message()), as_json=True)
        else:
            error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code or 0)


def _open_closed_streams() -> None:
    """A stream that the caller closed (`plait log P >&-`) is one that nobody reads."""
    # The next file that is opened would get its number otherwise, and be written to.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(plait_client.__version__)
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version and leave.",
    ),
) -> None:
    del version  # its callback has acted


def _register(app: typer.Typer, entry_point: EntryPoint) -> None:
    try:
        register: Callable[[typer.Typer], None] = entry_point.load()
    except ImportError as error:
        for name in _COMMANDS_OF.get(entry_point.name, (entry_point.name,)):
            app.command(name, context_settings=_UNPARSED)(_absent(name, entry_point.name, error))
        return
    register(app)


def _absent(command: str, extra: str, cause: ImportError) -> Callable[[], Any]:
    def refuse() -> None:
        raise NotInstalledError(
            f"`plait {command}` needs what isn't installed here: {cause}",
            remedy=f"pip install 'plait[{extra}]'",
        ) from cause

    refuse.__doc__ = f"(not installed: pip install 'plait[{extra}]')"
    return refuse
