"""Tables that read alike on a terminal and in a Markdown file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

RESULTS: Final = Path(__file__).parent / "results"
CURVES: Final = RESULTS / "bytes-per-change.json"

# By workload and line: bytes per changed element at each element density.
Curves = Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class Section:
    """One table with a title and what there is to know about it.

    Attributes:
        curves: what benchmarks.plot draws of it.
    """

    title: str
    notes: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    curves: Curves = field(default_factory=dict)

    def to_markdown(self) -> str:
        cells = [self.columns, *self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        lines = [f"## {self.title}", "", self.notes, ""]
        lines.append(_line(self.columns, widths))
        lines.append(_line(["-" * width for width in widths], widths))
        lines += [_line(row, widths) for row in self.rows]
        return "\n".join(lines) + "\n"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return (
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
    )
