"""What the command line prints: tables for people, one JSON document for programs.

Standard output carries the answer only. With `--json` that is exactly one JSON document if the
command succeeds and nothing if it fails; everything else (progress, warnings, errors) goes to
standard error. An error there is a line and its remedy, or with `--json` a problem document.
"""

import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from plait.errors import PlaitError, StoreError
from plait.wire import problem_of
from plait_client.disk import disk_errors
from plait_client.progress import SILENT, Progress

_PIPE_WIDTH: Final = 400

JsonOption = Annotated[
    bool, typer.Option("--json", help="One JSON document on standard output, nothing else there.")
]


class Output:
    """Where one command's answer goes."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        # In a file or a pipe a table is as wide as it needs to be.
        width = None if sys.stdout.isatty() else _PIPE_WIDTH
        self._console = _Paper(soft_wrap=True, highlight=False, width=width)

    def document(self, document: BaseModel | Mapping[str, Any]) -> None:
        """The answer for programs; people get nothing of it."""
        if self.as_json:
            plain = document
            if isinstance(document, BaseModel):
                plain = document.model_dump(mode="json", by_alias=True)
            with _written():
                # ASCII only: a file's name may be no text, and the terminal's encoding any.
                sys.stdout.write(json.dumps(plain, indent=2) + "\n")

    def line(self, text: str) -> None:
        """One line for people."""
        if not self.as_json:
            with _written():
                self._console.print(text, markup=False)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table for people; numbers stand to the right."""
        if self.as_json:
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        for index, column in enumerate(columns):
            numeric = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
            table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
        for row in rows:
            # As Text: a tensor's name may look like markup.
            table.add_row(*(Text(_cell(value)) for value in row))
        with _written():
            self._console.print(table)

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Bars with bytes, rate and time left on standard error, if that is a terminal."""
        if not sys.stderr.isatty():
            yield SILENT
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
            yield _BarProgress(bars)


class _Paper(Console):
    """rich's console, which leaves it to `_written` that nobody reads any more."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class _BarProgress:
    """The progress port as one rich bar after the other."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def begin(self, task: str, total: int) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(task, total=total)

    def advance(self, amount: int) -> None:
        if self._task is not None:
            self._bars.advance(self._task, amount)


def print_error(error: PlaitError, *, as_json: bool) -> None:
    """An error on standard error: what, and what to do about it."""
    if as_json:
        problem = problem_of(error).model_dump()
        sys.stderr.write(json.dumps(problem, separators=(",", ":"), default=str) + "\n")
        return
    sys.stderr.write(f"error: {error.message}\n")
    if error.remedy:
        sys.stderr.write(f"       {error.remedy}\n")


@contextmanager
def _written() -> Iterator[None]:
    """Around what goes to standard output: it is out when the block ends.

    Raises:
        SystemExit: with 0: the reader has enough (`plait log | head`).
        StoreError, NoSpace: nothing can be written there.
    """
    try:
        with disk_errors("write to standard output"):
            try:
                yield
                sys.stdout.flush()
            except OSError:
                # Python flushes what is left once more at its exit, and would complain again.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise
    except StoreError as error:
        if isinstance(error.__cause__, BrokenPipeError):
            raise SystemExit(0) from error
        raise


def human_bytes(size: int) -> str:
    """`1.23 MB`: decimal units, three digits."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{size} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
