"""Tables that read alike on a terminal and in a Markdown file."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """One table with a title and what there is to know about it."""

    title: str
    notes: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

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
