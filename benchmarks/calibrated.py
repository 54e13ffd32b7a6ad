"""Whether a calibrated cluster predicts what is measured: python benchmarks/calibrated.py --ranks 8

On the emulated cluster, as root:

    jobs/emulated_cluster --nodes 4 --ranks-per-node 2 --bandwidth 1gbit --delay 1ms --yield -- \\
        python benchmarks/calibrated.py --ranks 8 --out docs/results/calibrated

`treeattn calibrate`, then `treeattn compare` of every schedule at payloads that calibration did not use,
then `treeattn plot --figures predicted`. Goals: the median of |predicted / measured - 1| over all schemes and
sizes under 20 percent, and of CHOSEN_FROM the one that is predicted to be fastest within 10 percent of
the best measured, at every size.
Left in FOLDER: cluster.toml, compare.jsonl, calibrated.json, predicted.png.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import harness
import numpy as np

from treeattn.cli.compare_table import accuracy
from treeattn.cli.doctor import launcher
from treeattn.collectives import names
from treeattn.selection import select
from treeattn.study import environment
from treeattn.study.compare.rows import read
from treeattn.study.compare.summary import summarise
from treeattn.study.fit import RECORDS

SIZES = (1040, 4160, 16640, 66560)  # bytes: 2, 8, 32, 128 heads; calibration has 1, 4, 16, 64, 256
CHOSEN_FROM = (
    "recursive_doubling", "k_nomial_tree", "k_nomial_tree:radix=4", "double_binary_tree", "bine",
    "reduce_scatter_gather", "reduce_scatter_gather:order=near", "circulant", "hierarchical",
    "hierarchical:inner=k_nomial_tree", "hierarchical:inner=(k_ary_tree:radix=8)", "split_rail",
    "multi_leader", "all_gather_merge", "ring", "recursive_multiplying",
)  # fmt: skip
LINES = "compare.jsonl"
GOAL_ERROR, GOAL_CHOICE = 0.20, 1.10
TREEATTN = (sys.executable, "-m", "treeattn")


def mpi(ranks: int, *words: object) -> None:
    subprocess.run([launcher() or "mpiexec", "-n", str(ranks), *TREEATTN, *map(str, words)], check=True)


def measure(folder: Path, ranks: int, schemes: list[str], repetitions: int) -> None:
    """Calibrate, compare and plot."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster, lines = folder / "cluster.toml", folder / LINES
    lines.unlink(missing_ok=True)
    mpi(ranks, "calibrate", "--out", cluster, "--json", folder / "probes.json")
    mpi(ranks, "compare", "--schemes", ",".join(schemes), "--bytes", ",".join(map(str, SIZES)),
        "--head-dim", 128, "--cluster", cluster, "--repetitions", repetitions,
        "--out", lines)  # fmt: skip
    subprocess.run([*TREEATTN, "plot", lines, "--figures", "predicted", "--format", "png", "--out", folder],
                   check=True)  # fmt: skip


def judged(folder: Path) -> dict:
    """Errors of all points, as `compare` sums them up, and the time of what prediction chooses, of the best
    measured, size by size."""
    summaries = [one for one in summarise(read(folder / LINES)) if one["predicted_us"] is not None]
    cases = [[one for one in summaries if one["bytes"] == size] for size in SIZES]
    named = {select(scheme).text for scheme in CHOSEN_FROM}
    choices = []
    for size, case in zip(SIZES, cases, strict=True):
        taken = min((o for o in case if o["label"] in named), key=lambda one: one["predicted_us"])
        best = min(case, key=lambda one: one["time_us"])
        choices.append({
            "bytes": size, "taken": taken["label"], "best": best["label"],
            "ratio": taken["time_us"] / best["time_us"],
        })  # fmt: skip
    found = accuracy(cases)
    errors = [abs(one["predicted_us"] / one["time_us"] - 1) for one in summaries]
    return {
        "median_error": found["median"],
        "p90_error": float(np.quantile(errors, 0.9)),
        "in_interval": found["within_interval"],
        "worst_choice": found["worst_choice"],
        "choices": choices,
        "rows": [
            {"scheme": one["label"], "bytes": one["bytes"],
             "measured_us": one["time_us"], "predicted_us": one["predicted_us"]}
            for one in summaries
        ],
    }  # fmt: skip


def main() -> None:
    options = harness.options(
        __doc__,
        ranks=8,
        out={"type": Path, "default": Path("calibrated"), "metavar": "FOLDER"},
        repetitions=6,
        again={"action": "store_true", "help": "only judge what FOLDER holds"},
        note={"default": "", "help": "how quiet the machine was"},
    )
    assert not {size // 520 for size in SIZES} & {*RECORDS}, "a size was calibrated with"
    schemes = dict.fromkeys(select(name).text for name in (*names("schedule"), *CHOSEN_FROM))
    load = os.getloadavg()
    if not options.again:
        measure(options.out, options.ranks, [*schemes], options.repetitions)
    found = judged(options.out)
    facts = {
        **environment.software(), "cpu": environment.cpu_name(), "cores": os.cpu_count(),
        "load_before": load, "note": options.note, "ranks": options.ranks, **found,
    }  # fmt: skip
    harness.writer(options.out / "calibrated.json")(facts)
    print(
        f"median error {found['median_error']:.0%} (goal {GOAL_ERROR:.0%}), "
        f"90 % within {found['p90_error']:.0%}, {found['in_interval']:.0%} in their intervals"
    )
    for choice in found["choices"]:
        print("{bytes:>7} bytes: predicted is {taken}, {ratio:.2f} times the best, {best}".format(**choice))
    print(f"worst choice {found['worst_choice']:.2f} times the best (goal {GOAL_CHOICE})")


if __name__ == "__main__":
    main()
