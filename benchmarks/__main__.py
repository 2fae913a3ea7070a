"""Runs every benchmark, prints the tables and keeps them: `python -m benchmarks`."""

import datetime
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from benchmarks.anchors import anchors_sections
from benchmarks.codec import codec_sections
from benchmarks.exponent_classes import classes_section
from benchmarks.grain import grain_section
from benchmarks.module_engine import module_section
from benchmarks.reconstruction import reconstruction_sections
from benchmarks.registry import registry_section
from benchmarks.report import CURVES, RESULTS, Section

_PARTS: Final[dict[str, Callable[[], list[Section]]]] = {
    # First: it tells resident memory, of a process that has done nothing else.
    "reconstruction": reconstruction_sections,
    "codec": codec_sections,
    "anchors": anchors_sections,
    "classes": lambda: [classes_section()],
    "grain": lambda: [grain_section()],
    "registry": lambda: [registry_section()],
    "module": lambda: [module_section()],
}


def main() -> None:
    """Arguments name the parts to run. Without any, all run, and what they find is kept."""
    wanted = sys.argv[1:] or list(_PARTS)
    if unknown := set(wanted) - _PARTS.keys():
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(_PARTS)}")
    load_before = os.getloadavg()[0]
    sections = [section for part in wanted for section in _PARTS[part]()]
    page = "\n".join([_heading(load_before), *(section.to_markdown() for section in sections)])
    print(page)
    if not sys.argv[1:]:
        _keep(page, sections)


def _keep(page: str, sections: list[Section]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.md").write_text(page)
    curves = {title: lines for section in sections for title, lines in section.curves.items()}
    CURVES.write_text(json.dumps(curves, indent=1) + "\n")


def _heading(load_before: float) -> str:
    return (
        f"# Benchmarks of {datetime.datetime.now(datetime.UTC):%Y-%m-%d}\n\n"
        f"{_processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, torch "
        f"{torch.__version__}. Load average of the machine at the start {load_before:.1f}, at the "
        f"end {os.getloadavg()[0]:.1f} (the benchmarks' own included; an idle machine starts "
        "below 0.5).\n"
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(": ", 1)[1] for x in lines if x.startswith("model name")), "processor")


if __name__ == "__main__":
    main()
