"""Runs the harness for an experiment: schemes interleaved, results checked, everything kept."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from treeattn.errors import TreeattnError
from treeattn.study.compare.measure import Effort
from treeattn.study.compare.schema import Key
from treeattn.study.compare.sweep import Block, Sweep

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["cold", "decode_key", "median", "payload", "run", "sizes"]

SEED = 0

#: Points of one key: the fields that `Bench.block` gives.
Points = list[dict[str, Any]]


def sizes(comm: Intracomm, wanted: Sequence[int]) -> list[int]:
    """The numbers of ranks among `wanted` that this job has."""
    return [ranks for ranks in wanted if ranks <= comm.size]


def decode_key(scheme: str, ranks: int, tokens: int, heads: int, head_dim: int, dtype: str) -> Key:
    """A whole step: one query of one sequence, as many KV heads as heads, as in the paper."""
    return Key("decode", scheme, ranks, tokens, 1, 1, heads, heads, head_dim, dtype)


def run(comm: Intracomm, keys: Sequence[Key], effort: Effort) -> dict[Key, Points]:
    """The points of every key, on rank 0; nothing elsewhere. Collective.

    keys: those of one number of ranks together, and of one case. Raises on all ranks what a scheme raised,
    and `TreeattnError` if a result missed its bound: then its time would mean nothing.
    """
    points: dict[Key, Points] = {}
    problems: list[TreeattnError] = []

    def take(block: Block, fields: dict[str, Any]) -> None:
        points.setdefault(block.key, []).append(fields)

    def give_up(key: Key, error: TreeattnError) -> None:
        problems.append(error)

    def began(block: Block) -> None:
        pass

    Sweep(keys, effort, 1, SEED, {}, take, give_up, began).run(comm)
    problems += [problem for key in points for problem in _missed(key, points[key])]
    problems = comm.bcast(problems)
    if problems:
        raise problems[0]
    return points


def _missed(key: Key, points: Points) -> list[TreeattnError]:
    worst = max(points, key=lambda point: math.inf if math.isnan(point["error_out"]) else point["error_out"])
    exact = all(point["error_out"] <= point["bound_out"] for point in points)  # false for NaN
    if exact and all(point["same_bits"] is not False for point in points):
        return []
    error, bound = f"{worst['error_out']:.1e}", f"{worst['bound_out']:.1e}"
    return [
        TreeattnError(
            f"{key.scheme} on {key.ranks} ranks: error {error}, bound {bound}, or bits that differ between "
            "ranks; what a wrong result costs is not shown"
        )
    ]


def _median_of(points: Points, of_block: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(of_block(point) for point in points)


def median(points: Points, series: str = "completion") -> float:
    """Milliseconds: the median over blocks of the median over iterations, last exit minus first entry."""
    return _median_of(points, lambda point: statistics.median(point["samples"][series])) / 1000


def cold(points: Points) -> float:
    """Milliseconds of planning and the first call after it, median over blocks."""
    return _median_of(points, lambda point: float(point["plan"]) + float(point["first"])) / 1000


def payload(points: Points) -> int | None:
    """Bytes that all ranks together hand to MPI in a step; None where only the library knows."""
    sent = points[0]["sent"]
    return None if sent is None else sum(int(tier[1]) for tier in sent.values())
