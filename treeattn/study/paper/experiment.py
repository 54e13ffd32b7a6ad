"""What an experiment is, functions from a setting to tables; the harness that one runs: schemes interleaved,
results checked, everything kept; and where the paper's settings are simulated. What the tables mean stands in
docs/paper.md."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from treeattn import collectives
from treeattn.collectives import Schedule
from treeattn.collectives.clusters import placement
from treeattn.collectives.clusters.description import Cluster
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.errors import TreeattnError
from treeattn.mpi import library
from treeattn.study.compare import sweep as blocks
from treeattn.study.compare.measure import Effort
from treeattn.study.compare.rows import Key

#: The shipped description of the paper's cluster.
MACHINE = "dgx-h100"

#: What stands where the paper has a mark in a figure; no number was read off one.
IN_THE_FIGURE = "in the figure"

#: A number, words in place of one, or nothing: not measured, or not said.
Cell = float | str | None


def shown(value: Cell) -> str:
    """A cell as text: whole numbers in full, others to 4 significant digits."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2e}" if abs(value) < 1e-3 else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one cell for each heading; headings name units and say whose number it is."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.headings):
                raise ValueError(f"{self.title}: {len(row)} cells under {len(self.headings)} headings")


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment of Shyam et al., "Tree Attention", arXiv 2408.04093v4.

    where: its place in the paper. paper: its setting, the arguments of `model`: what the paper's equations
    say, and the simulator; it needs no MPI. small: one that runs for real on a few ranks, the arguments of
    `measure` after the communicator; None where nothing runs. measure is collective and returns tables on
    rank 0, nothing elsewhere.
    """

    title: str
    where: str
    model: Callable[..., list[Table]]
    paper: dict[str, Any]
    measure: Callable[..., list[Table]] = lambda comm: []
    small: dict[str, Any] | None = None


def placed(cluster: Cluster, scheme: str, ranks: int) -> tuple[Schedule, placement.Placement]:
    """A schedule for ranks of which neighbours share nodes, and where they sit."""
    places = placement.block(cluster, ranks)
    nodes = placement.node_groups(cluster, places) if collectives.needs_nodes(scheme) else None
    return collectives.build(scheme, ranks, nodes=nodes), places


#: Where nothing depends on time.
COUNTED = Effort(repetitions=1, iterations=3, seconds=0.01)

#: Points of one key: the columns that `Bench.block` gives.
Points = list[dict[str, Any]]


def sweep(
    keys: Callable[..., list[Key]], tables: Callable[[dict[Key, Points]], list[Table]]
) -> Callable[..., list[Table]]:
    """The `measure` of an experiment: of `keys` for the numbers of ranks that the job has, its `tables`."""

    def measure(comm: MpiCommunicator, effort: Effort, ranks: Sequence[int], **setting: Any) -> list[Table]:
        fitting = [size for size in ranks if size <= comm.size]
        points = run(comm, keys(fitting, **setting), effort)
        return tables(points) if points else []

    return measure


def decode_key(scheme: str, ranks: int, tokens: int, heads: int, head_dim: int) -> Key:
    """A whole step: one query of one sequence, as many KV heads as heads, as in the paper."""
    return Key("decode", scheme, ranks, tokens, 1, 1, heads, heads, head_dim, "bfloat16")


@contextmanager
def first_ranks(comm: MpiCommunicator, ranks: int) -> Iterator[MpiCommunicator | None]:
    """A communicator of the first so many; the others sleep meanwhile, so that they take no core away.
    Collective."""
    member = comm.rank < ranks
    part: Any = comm.Split(0 if member else library.load().UNDEFINED, comm.rank)
    yield part if member else None
    if member:
        part.Free()
    comm.barrier_asleep()


def run(comm: MpiCommunicator, keys: Sequence[Key], effort: Effort) -> dict[Key, Points]:
    """The points of every key in the order of `keys`, on rank 0; nothing elsewhere. Collective.

    keys: those of one number of ranks together, and of one case. Raises on all ranks what a scheme raised,
    and `TreeattnError` if a result missed its bound: then its time would mean nothing.
    """
    points: dict[Key, Points] = {key: [] for key in keys} if comm.rank == 0 else {}
    problems: list[TreeattnError] = []
    for ranks, of_size in itertools.groupby(keys, lambda key: key.ranks):
        with first_ranks(comm, ranks) as part:
            for block, found in blocks.sweep(part, list(of_size), effort) if part is not None else ():
                if isinstance(found, TreeattnError):
                    problems.append(found)
                elif found is not None:
                    points[block.key].append(found)
    problems = comm.bcast(problems or [problem for key in points for problem in _missed(key, points[key])])
    if problems:
        raise problems[0]
    return points


def _missed(key: Key, points: Points) -> list[TreeattnError]:
    wrong = [
        f"{key.scheme} on {key.ranks} ranks: error {point['error_out']:.1e}, bound {point['bound_out']:.1e}, "
        "or bits that differ between ranks; what a wrong result costs is not shown"
        for point in points
        if not point["error_out"] <= point["bound_out"] or point.get("same_bits") is False  # NaN is wrong too
    ]
    return [TreeattnError(text) for text in wrong[:1]]


def median(points: Points) -> float:
    """Milliseconds from the last entry to the last exit: the median over blocks of the median over
    iterations."""
    return float(statistics.median(point["time_us"] for point in points)) / 1000


def cold(points: Points) -> float:
    """Milliseconds of planning and the first call after it, median over blocks."""
    return statistics.median(float(point["plan_us"]) + float(point["first_us"]) for point in points) / 1000
