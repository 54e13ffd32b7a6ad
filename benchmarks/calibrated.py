"""Whether a calibrated cluster predicts what is measured: python benchmarks/calibrated.py --ranks 8

On the emulated cluster, as root:

    jobs/emulated_cluster --nodes 4 --ranks-per-node 2 --bandwidth 1gbit --delay 1ms --yield -- \\
        python benchmarks/calibrated.py --ranks 8 --out docs/results/calibrated

`treeattn calibrate`, then `treeattn compare` of every schedule at payloads that calibration did not use,
then `treeattn plot --figures predicted`. Goals: the median of |predicted / measured - 1| over all schemes and
sizes under 20 percent, and the scheme that `auto` would take within 10 percent of the best measured, at every
size.
Left in FOLDER: cluster.toml, compare.jsonl.xz, calibrated.json, predicted-*.png.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import statistics
import subprocess
import sys
from pathlib import Path

from treeattn.collectives import names
from treeattn.collectives.clusters.probes import RECORDS
from treeattn.decoder.fastest import candidates
from treeattn.decoder.plan import select
from treeattn.study import environment
from treeattn.study.compare.results import Summary, compared_series, read, summarise

HEADS = (2, 8, 32, 128)  # of 520 bytes; calibration has 1, 4, 16, 64, 256
LINES = "compare.jsonl.xz"
GOAL_ERROR, GOAL_CHOICE = 0.20, 1.10
TREEATTN = (sys.executable, "-m", "treeattn")


def mpi(ranks: int, *words: object) -> None:
    beside = Path(sys.executable).parent / "mpiexec"
    launcher = str(beside) if beside.exists() else "mpiexec"
    subprocess.run([launcher, "-n", str(ranks), *TREEATTN, *map(str, words)], check=True)


def measure(folder: Path, ranks: int, schemes: list[str], seconds: float, repetitions: int) -> None:
    """Calibrate, compare and plot."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster, lines = folder / "cluster.toml", folder / "compare.jsonl"
    lines.unlink(missing_ok=True)
    mpi(ranks, "calibrate", "--out", cluster, "--json", folder / "probes.json")
    mpi(ranks, "compare", "--schemes", ",".join(schemes), "--what", "reduce", "--heads",
        ",".join(map(str, HEADS)), "--cluster", cluster, "--seconds", seconds, "--repetitions", repetitions,
        "--out", lines)  # fmt: skip
    subprocess.run([*TREEATTN, "plot", lines, "--figures", "predicted", "--format", "png", "--out", folder],
                   check=True)  # fmt: skip
    (folder / LINES).write_bytes(lzma.compress(lines.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
    lines.unlink()


def _in_interval(one: Summary, series: str) -> bool | None:
    """Whether what was measured lies where the prediction says; None in results that say nothing."""
    estimate = one.facts["estimate"]
    return estimate and estimate.low <= one.times[series].median <= estimate.high


def judged(folder: Path, ranks: int) -> dict:
    """Errors of all points, and what auto's choice costs beside the best, size by size."""
    rows, choices = [], []
    named = {select(scheme).text for scheme in candidates(ranks)}
    for heads in HEADS:
        of_case = [one for one in summarise(read(folder / LINES)) if one.key.heads == heads]
        series = compared_series(of_case)
        here = [
            {"scheme": one.key.scheme, "bytes": 520 * heads, "measured_us": one.times[series].median,
             "predicted_us": one.facts["predicted"], "in_interval": _in_interval(one, series)}
            for one in of_case
            if one.facts["predicted"]
        ]  # fmt: skip
        rows += here
        best = min(here, key=lambda row: row["measured_us"])
        taken = min((row for row in here if row["scheme"] in named), key=lambda row: row["predicted_us"])
        ratio = taken["measured_us"] / best["measured_us"]
        choices.append(
            {"bytes": 520 * heads, "taken": taken["scheme"], "best": best["scheme"], "ratio": ratio}
        )
    errors = sorted(abs(row["predicted_us"] / row["measured_us"] - 1) for row in rows)
    return {
        "median_error": statistics.median(errors),
        "p90_error": errors[int(0.9 * len(errors))],
        "in_interval": statistics.fmean(map(bool, (row["in_interval"] for row in rows))),
        "worst_choice": max(choice["ratio"] for choice in choices),
        "choices": choices,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("calibrated"), metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each point of the comparison")
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--again", action="store_true", help="only judge what FOLDER holds")
    parser.add_argument("--note", default="", help="how quiet the machine was")
    options = parser.parse_args()
    assert not {*HEADS} & {*RECORDS}, "a size was calibrated with"
    schemes = dict.fromkeys(select(name).text for name in (*names("schedule"), *candidates(options.ranks)))
    load = os.getloadavg()
    if not options.again:
        measure(options.out, options.ranks, [*schemes], options.seconds, options.repetitions)
    found = judged(options.out, options.ranks)
    facts = {
        **environment.software(), "cpu": environment.cpu_name(), "cores": os.cpu_count(),
        "load_before": load, "note": options.note, "ranks": options.ranks, **found,
    }  # fmt: skip
    (options.out / "calibrated.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(
        f"median error {found['median_error']:.0%} (goal {GOAL_ERROR:.0%}), "
        f"90 % within {found['p90_error']:.0%}, {found['in_interval']:.0%} in their intervals"
    )
    for choice in found["choices"]:
        print("{bytes:>7} bytes: auto takes {taken}, {ratio:.2f} times the best, {best}".format(**choice))
    print(f"worst choice {found['worst_choice']:.2f} times the best (goal {GOAL_CHOICE})")


if __name__ == "__main__":
    main()
