"""Draws what `make soak` noted, memory over steps: python tools/soak_plot.py NOTES.jsonl OUT.svg"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from treeattn.study.figures.chart import Lines, Point, Series
from treeattn.study.figures.draw import render


def main() -> None:
    notes, out = map(Path, sys.argv[1:])
    runs = [json.loads(line) for line in notes.read_text().splitlines()]
    series = []
    for run in runs:
        held = [one["memory"] for one in run["held"]]
        share = 100 / (len(held) - 1)
        points = (Point(share * at, (memory - held[0]) / 1024) for at, memory in enumerate(held))
        series.append(Series(f"{run['what']}, {run['ranks']} ranks: {run['steps']:,} steps", tuple(points)))
    chart = Lines(
        name="soak",
        title="Memory of rank 0 while the same is done again and again",
        case="resident, beyond what it took to begin with",
        notes=(),
        x_label="steps (percent)",
        y_label="KiB",
        series=tuple(series),
        x_log=False,
        intervals=False,
    )
    out.write_bytes(render(chart, ("svg",))["svg"])


if __name__ == "__main__":
    main()
