"""Draws the last full run's sizes: `python -m benchmarks.plot` writes docs/images."""

import json
from pathlib import Path
from typing import Final

import matplotlib
from matplotlib import pyplot

from benchmarks.report import CURVES

_IMAGE: Final = Path(__file__).parent.parent / "docs" / "images" / "bytes-per-change.svg"
_TICKS: Final = (0.3, 0.5, 1, 2, 5, 10)
_LEFT_OUT: Final = "whole checkpoint"  # two bytes over the density: off any scale


def main() -> None:
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "plait"
    workloads = json.loads(CURVES.read_text())
    figure, axes = pyplot.subplots(
        1, len(workloads), figsize=(6 * len(workloads), 5), sharey=True, layout="constrained"
    )
    for axis, (title, lines) in zip(axes, workloads.items(), strict=True):
        for name, points in lines.items():
            if name == _LEFT_OUT:
                continue
            ordered = sorted((float(density), size) for density, size in points.items())
            style = "--" if name.startswith("limit") else "-"
            width = 2.5 if name == "plait" else 1.2
            axis.plot(
                [100 * density for density, _ in ordered], [size for _, size in ordered],
                style, linewidth=width, marker="." , label=name,
            )  # fmt: skip
        axis.set(title=title, xscale="log", xlabel="changed elements, %", ylim=(0, None))
        axis.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("stored bytes per changed element")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    _IMAGE.parent.mkdir(exist_ok=True)
    figure.savefig(_IMAGE, metadata={"Date": None})


if __name__ == "__main__":
    main()
