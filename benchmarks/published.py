"""All-reductions that others published of supercomputers, predicted by the simulator's prices.

    python benchmarks/published.py --known pico_collectives.csv.gz --held pico_collectives.csv.gz \\
        --allocations pico_allocations.csv.gz --runs pico_runs.csv --json docs/results/published.json

FILEs are CSV, or gzip of it, with the columns of PICO's (docs/predicted.md). What counts are all-reductions
over the host's MPI library, one rank on each node, 256 bytes to 1 MiB, by a program whose schedule is one
of ours. Each run of --held is predicted from all other runs of --known and, of its own, from recursive
doubling nearest 256 bytes and at its largest size up to 128 KiB, and the ring nearest 2 KiB; with --blind
from nothing of its own.

Where all ranks do the same, a simulated time is a sum over rounds: a call, of each round a latency by the
size of its messages and by whether one leaves its group, and bytes, sent and merged. These prices of a
machine, and factors of a run for calls, latency and bytes, are fitted; each is thought to be normal in its
logarithm.
"""

from __future__ import annotations

import csv
import functools
import gzip
import itertools
import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import harness
import numpy as np
from scipy.optimize import least_squares

from treeattn.collectives import build

HALVES = "reduce_scatter_gather:order=near"
HOST = {"recursive_doubling": "recursive_doubling", "rabenseifner": HALVES, "ring": "ring"}
SCHEMES = {name + by: scheme for by in ("_ompi", "_mpich", "_over") for name, scheme in HOST.items()} | {
    "default-recursive_doubling": "recursive_doubling",
    "default-ring": "ring",
    "RECDOUB-L-UTOFU-0-1": "recursive_doubling",
    "RECDOUB-B_CONT-UTOFU-0-1": HALVES,
}
FITTED = {  # programs whose schedule is ours but whose times are not held
    "bine_lat_over": "bine", "bine_bdw_remap_over": "bine:form=bandwidth",
    "BINE-L-UTOFU-0-1": "bine", "BINE-B_CONT-UTOFU-0-1": "bine:form=bandwidth",
}  # fmt: skip
#: Bytes from which a message takes another way: out of inline, out of short eager, into rendezvous.
STEPS = (193, 2048, 16384)
#: Price of a machine -> expected logarithm, deviation of one machine, and of all together. Microseconds (a
#: round, a call) and microseconds a byte; steps are factors on the size before, leaving a group a fraction.
PRICES = {
    "round": (math.log(2.5), 0.7, 0.35), "call": (math.log(1.5), 0.6, 0.3),
    "sent": (math.log(1e-4), 0.8, 0.4), "merged": (math.log(1e-4), 0.6, 0.3),
    "step 0": (0.2, 0.25, 0.3), "step 1": (0.2, 0.25, 0.3), "step 2": (0.5, 0.35, 0.3),
    "leave": (0.2, 0.15, 0.075),
}  # fmt: skip
FACTORS = {"call of": 0.6, "round of": 0.6, "byte of": 0.35}  # of a run, deviations
MISSED = 0.1  # deviation of the logarithm of what right prices miss


class Run(NamedTuple):
    """A job. groups: of each rank, where the allocation is known."""

    name: str
    ranks: int
    system: str
    library: str
    groups: tuple[str, ...]


class Row(NamedTuple):
    """A program's median at one size, in microseconds."""

    run: Run
    algorithm: str
    scheme: str
    bytes: int
    measured: float

    @property
    def machine(self) -> tuple[str, bool]:
        """The system, and whether by its network's own interface instead of MPI."""
        return self.run.system, "UTOFU" in self.algorithm


def table(path: Path) -> list[dict[str, str]]:
    content = path.read_bytes()
    text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    return list(csv.DictReader(text.decode().splitlines()))


def read(paths: list[Path], allocations: list[Path], runs: list[Path]) -> list[Row]:
    """The rows that count. Raises KeyError for a file without a column that is needed."""
    groups: defaultdict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for one in (one for path in allocations for one in table(path)):
        groups[one["run"], one["ranks"]][int(one["rank"])] = one["group"]
    devices = {(one["run"], one["ranks"], one["library"]): one["device"] for p in runs for one in table(p)}
    found = []
    for one in (one for path in paths for one in table(path)):
        size, ranks, scheme = int(one["bytes"]), int(one["ranks"]), (SCHEMES | FITTED).get(one["algorithm"])
        device = devices.get((one["run"], one["ranks"], one["library"]), "cpu")
        host = device == "cpu" and "CUDA" not in one["library"] and one["collective"] == "allreduce"
        if not (scheme and host and one["ppn"] == "1" and ranks > 1 and 256 <= size <= 1 << 20):
            continue
        if scheme in ("ring", HALVES) and size // 4 < ranks:  # PICO sums int32: fewer elements than ranks
            scheme = "recursive_doubling"
        of_rank = groups[one["run"], one["ranks"]]
        at = tuple(of_rank[rank] for rank in range(ranks)) if len(of_rank) == ranks else ()
        run = Run(one["run"], ranks, one["system"], one["library"], at)
        found.append(Row(run, one["algorithm"], scheme, size, float(one["median_us"])))
    return found


@functools.cache
def rounds(scheme: str, run: Run) -> list[tuple[int, float, bool, bool]]:
    """(how many equal rounds, share of the vector in a message, whether merged, whether one leaves its
    group)."""
    if scheme == "ring":  # of thousands of ranks it is not built: all its rounds are alike
        leaves = len(set(run.groups)) > 1
        return [(run.ranks - 1, 1 / run.ranks, merge, leaves) for merge in (True, False)]
    schedule = build(scheme, run.ranks)
    return [
        (1, max(len(t.chunks) for t in of) / schedule.chunks, of[0].merge,
         bool(run.groups) and any(run.groups[t.src] != run.groups[t.dst] for t in of))
        for of in schedule.rounds
    ]  # fmt: skip


@functools.cache
def sums(scheme: str, run: Run, size: int) -> np.ndarray:
    """Rounds by size, those of them that leave a group, bytes sent one after the other, and merged."""
    found = np.zeros((2, len(STEPS) + 2))
    for count, share, merge, leaves in rounds(scheme, run):
        at = sum(share * size >= step for step in STEPS)
        found[0, at] += count
        found[1, at] += count * leaves
        found[:, -1] += count * share * size * np.array([1, merge])
    return found


def resemblance(one: Run, other: Run) -> float:
    """Correlation of the factors of two runs: by machine, number of nodes, day and library."""
    if one == other or one.system != other.system:
        return float(one == other)
    near = math.exp(-abs(math.log2(one.ranks / other.ranks)) / 2)
    same_day, same_library = one.name[:10] == other.name[:10], one.library == other.library
    return 0.2 + 0.3 * near + 0.3 * near * same_day + 0.1 * same_library


def predicted(known: list[Row], asked: list[Row]) -> np.ndarray:
    """Microseconds of `asked`, whose own times are not looked at, by prices fitted to `known`."""
    rows = [*known, *asked]
    machines, runs = (list(dict.fromkeys(of)) for of in ((r.machine for r in rows), (r.run for r in rows)))
    names = [*itertools.product(PRICES, machines), *itertools.product(FACTORS, runs)]
    at = {name: index for index, name in enumerate(names)}
    mean = np.array([PRICES[name][0] if name in PRICES else 0.0 for name, _ in names])
    blocks = [shared**2 + own**2 * np.eye(len(machines)) for _, own, shared in PRICES.values()]
    alike = np.array([[resemblance(one, other) for other in runs] for one in runs])
    blocks += [deviation**2 * alike for deviation in FACTORS.values()]
    root = np.zeros((len(names), len(names)))
    for first, block in zip(np.cumsum([0, *map(len, blocks)]), blocks, strict=False):
        root[first : first + len(block), first : first + len(block)] = np.linalg.cholesky(block)
    counts = np.array([sums(row.scheme, row.run, row.bytes) for row in rows])
    where = {name: [at[name, row.machine] for row in rows] for name in PRICES}
    where |= {name: [at[name, row.run] for row in rows] for name in FACTORS}

    def logs(whitened: np.ndarray) -> np.ndarray:
        values = mean + root @ whitened
        of = {name: values[index] for name, index in where.items()}
        steps = np.exp(np.cumsum([0 * of["round"], *(of[f"step {n}"] for n in range(len(STEPS)))], axis=0)).T
        latency = (steps * (counts[:, 0, :-1] + of["leave"][:, None] * counts[:, 1, :-1])).sum(1)
        sent, merged = (np.exp(of[name]) * counts[:, n, -1] for n, name in enumerate(("sent", "merged")))
        call, unit = np.exp(of["call"] + of["call of"]), np.exp(of["round"] + of["round of"])
        return np.log(call + unit * latency + np.exp(of["byte of"]) * (sent + merged))

    measured = np.log([row.measured for row in known])

    def missed(whitened: np.ndarray) -> np.ndarray:
        return np.concatenate([(logs(whitened)[: len(known)] - measured) / MISSED, whitened])

    return np.exp(logs(least_squares(missed, np.zeros(len(names)), xtol=1e-4, ftol=1e-5).x)[len(known) :])


def known_of(rows: list[Row]) -> list[Row]:
    """What is known of a run that is held: over MPI, of the library's own program before PICO's."""
    own = sorted((row for row in rows if not row.machine[1]), key=lambda row: row.algorithm.endswith("_over"))

    def of_program(word: str) -> list[Row]:
        named = [row for row in own if word in row.algorithm]
        return [row for row in named if row.algorithm == named[0].algorithm]

    whole, ring = of_program("doubling"), of_program("ring")
    found = [min(whole, key=lambda row: abs(math.log(row.bytes / 256)))] if whole else []
    large = [row for row in whole if row.bytes <= 128 << 10 and row not in found]
    found += [max(large, key=lambda row: row.bytes)] if large else []
    return found + ([min(ring, key=lambda row: abs(math.log(row.bytes / 2048)))] if ring else [])


def two_parameters(others: list[Row], own: list[Row], asked: list[Row]) -> np.ndarray:
    """The model to be beaten: rounds times a latency plus bytes times a price (Hockney, 1994), by least
    relative squares from what is known of the run, else from other runs of the machine, else from all."""

    def features(rows: list[Row]) -> np.ndarray:
        found = np.array([sums(row.scheme, row.run, row.bytes)[0] for row in rows])
        return np.stack([found[:, :-1].sum(1), found[:, -1]], axis=1)

    rows = own if len(own) > 1 else [r for r in others if r.run.system == asked[0].run.system] or others
    times = np.array([row.measured for row in rows])
    slopes, *_ = np.linalg.lstsq(features(rows) / times[:, None], np.ones(len(rows)), rcond=None)
    return np.maximum(features(asked) @ slopes, 1e-3)


def score(rows: list[dict], by: str) -> dict[str, float]:
    """Errors as fractions; of ratios over all pairs of schemes of a run and size."""
    errors = np.array([abs(row[by] / row["measured_us"] - 1) for row in rows])
    ratios = [
        abs(one[by] / other[by] / (one["measured_us"] / other["measured_us"]) - 1)
        for several in cases(rows)
        for one, other in itertools.combinations(several, 2)
        if one["scheme"] != other["scheme"]
    ]
    return {
        "median_error": float(np.median(errors)), "p90_error": float(np.quantile(errors, 0.9)),
        "within_25": float(np.mean(errors <= 0.25)),
        "ratio_error": float(np.median(ratios)) if ratios else math.nan,
    }  # fmt: skip


def cases(rows: list[dict]) -> list[list[dict]]:
    found: defaultdict[tuple, list[dict]] = defaultdict(list)
    for row in rows:
        found[row["run"], row["ranks"], row["bytes"]].append(row)
    return [of for of in found.values() if len({row["scheme"] for row in of}) > 1]


def main() -> None:
    files = {"type": Path, "nargs": "+", "metavar": "FILE", "default": []}
    options = harness.options(
        __doc__, known=files, held=files, allocations=files, runs=files, blind=False, required=True
    )
    known, held = (read(of, options.allocations, options.runs) for of in (options.known, options.held))
    rows = []
    for run in dict.fromkeys(row.run for row in held):
        of_run = [row for row in held if row.run == run and row.algorithm in SCHEMES]
        others = [row for row in known if (row.run.name, row.run.ranks) != (run.name, run.ranks)]
        own = [] if options.blind else known_of(of_run)
        asked = [row for row in of_run if row not in own]
        if not asked:
            continue
        times = predicted([*others, *own], asked), two_parameters(others, own, asked)
        for row, time, simple in zip(asked, *times, strict=True):
            rows.append({
                "system": run.system, "run": run.name, "ranks": run.ranks, "algorithm": row.algorithm,
                "scheme": row.scheme, "bytes": row.bytes, "measured_us": row.measured,
                "predicted_us": float(time), "two_parameters_us": float(simple),
            })  # fmt: skip
    if not rows:
        harness.stop(
            "--held holds nothing to predict: one rank a node, 256 B to 1 MiB, programs of our schemes"
        )
    chosen = [min(several, key=lambda row: row["predicted_us"])["measured_us"] for several in cases(rows)]
    best = [min(row["measured_us"] for row in several) for several in cases(rows)]
    named = sum(one <= 1.05 * least for one, least in zip(chosen, best, strict=True))
    found = score(rows, "predicted_us")
    simple = {"two_parameters": score(rows, "two_parameters_us")}
    options.write({"rows": rows, **found, "winner_named": named, "winner_cases": len(best), **simple})
    harness.show([{"rows": len(rows), **found}, {"rows": len(rows), **simple["two_parameters"]}])
    print(f"the fastest program, or one within 5 % of it, is named in {named} of {len(best)} cases")


if __name__ == "__main__":
    main()
