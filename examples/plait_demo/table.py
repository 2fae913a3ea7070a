"""What the demo shows while it runs: steps, a live table of versions, and the verdict."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.table import Table

from plait_client.output import human_bytes
from plait_demo.proofs import Proof

_COLUMNS: Final = (
    "version", "reward", "density", "payload", "smaller", "publish", "proven in both", "pause",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One published version.

    Attributes:
        reward: mean of the answers that its step learnt from; None for the base model.
        density: changed elements over all.
        payload_bytes, dense_bytes: what a follower fetches; what the whole weights take.
        publish_seconds: from the call of `publish` to the commit.
        proven_seconds: from the call of `publish` until both engines had proven it.
        pause_seconds: how long generation stood still, in the slower engine.
    """

    seq: int
    reward: float | None
    density: float
    payload_bytes: int
    dense_bytes: int
    publish_seconds: float
    proven_seconds: float
    pause_seconds: float

    @property
    def ratio(self) -> float:
        return self.dense_bytes / self.payload_bytes

    def to_document(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            str(self.seq),
            "-" if self.reward is None else f"{self.reward:.3f}",
            f"{self.density:.3%}",
            human_bytes(self.payload_bytes),
            f"{self.ratio:,.0f}x",
            f"{self.publish_seconds:.2f} s",
            f"{self.proven_seconds:.2f} s",
            f"{1000 * self.pause_seconds:.0f} ms",
        )


class Show:
    """For people. On a terminal the table grows in place; elsewhere each version is a line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._live: Live | None = None
        self._first = 0  # row of the table under way
        self.rows: list[VersionRow] = []

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def step(self, text: str) -> None:
        self._console.print(f"[dim]{self.seconds:5.0f} s[/dim]  {text}", highlight=False)

    @contextmanager
    def table(self) -> Iterator[None]:
        """Versions added inside belong to one table."""
        self._first = len(self.rows)
        if not self._console.is_terminal:
            self._console.print("         " + "".join(f"{name:>15}" for name in _COLUMNS))
            yield
            return
        with Live(self._table(), console=self._console, auto_refresh=False) as self._live:
            yield
        self._live = None

    def add(self, row: VersionRow) -> None:
        self.rows.append(row)
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        else:
            cells = "".join(f"{cell:>15}" for cell in row.cells)
            self._console.print("         " + cells, highlight=False)

    def verdict(self, proofs: list[Proof], passed: bool) -> None:
        table = Table(box=None, pad_edge=False, show_header=False)
        for proof in proofs:
            word = "[green]PASS[/green]" if proof.passed else "[red]FAIL[/red]"
            table.add_row(word, proof.claim, f"{proof.checks}x" if proof.checks else "unchecked")
            for failure in proof.failures[:3]:
                table.add_row("", f"  {failure}", "")
        self._console.print(table)
        word = "[green]all proofs hold[/green]" if passed else "[red]a proof failed[/red]"
        self.step(f"{word}")

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in _COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows[self._first :]:
            table.add_row(*row.cells)
        return table
