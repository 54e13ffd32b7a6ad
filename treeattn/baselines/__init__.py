"""Other ways to the same result, to measure against: what is published, and what serving engines do.

One file each, exact and tested like the rest. A baseline is a row here and is named in ``scheme=`` like a
schedule. It is either a reduction of finished partials, or a ring that computes while it communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from treeattn.attention.shape import Shape
from treeattn.baselines.sent import Sent
from treeattn.collectives.catalog import Scheme, parse
from treeattn.collectives.parameters import Parameter

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["BASELINES", "Sent", "plan"]


class Job(NamedTuple):
    """What a baseline is planned for: the arguments of `plan`."""

    comm: Intracomm
    shape: Shape
    attention: Callable[..., None]
    scale: float
    merge: Any
    records: Any
    reduced: Any


# The modules are imported when a baseline is planned: naming schemes needs no MPI library.


def _three_allreduce(job: Job) -> tuple[Any, Any]:
    """The library's all-reduction three times: max, sum of denominators, sum of numerators."""
    from treeattn.baselines.three_allreduce import ThreeAllreduce

    return job.attention, ThreeAllreduce(job.comm, job.merge, job.reduced)


def _two_allreduce(job: Job) -> tuple[Any, Any]:
    """The library's all-reduction twice: max, then one sum of denominators and numerators."""
    from treeattn.baselines.two_allreduce import TwoAllreduce

    return job.attention, TwoAllreduce(job.comm, job.merge, job.reduced)


def _head_all_to_all(job: Job) -> tuple[Any, Any]:
    """One packed exchange: each rank merges its slice of heads; what serving engines do."""
    from treeattn.baselines.head_all_to_all import HeadAllToAll

    group = job.shape.batch * job.shape.queries
    return job.attention, HeadAllToAll(job.comm, job.merge, job.reduced, group)


def _kv_ring(job: Job, expanded: str, rotation: str) -> tuple[Any, Any]:
    """Ring Attention: keys and values travel, and every rank attends to all of them."""
    from treeattn.baselines.kv_ring import KvRing

    ring = KvRing(
        *(job.comm, job.shape, job.scale, job.merge, job.records),
        expanded=expanded == "yes",
        full_rotation=rotation == "full",
    )
    return ring.begin, ring


def _query_ring(job: Job) -> tuple[Any, Any]:
    """Slices of the query heads pass by the shards and collect each one's contribution (pass-Q)."""
    from treeattn.baselines.query_ring import QueryRing

    ring = QueryRing(job.comm, job.shape, job.scale, job.merge, job.records)
    return ring.begin, ring


BASELINES: dict[str, Scheme] = {
    row.name: row
    for row in (
        Scheme(
            "kv_ring",
            _kv_ring,
            "h (alpha + 2 S beta), S bytes of one shard's keys or values; h = p-1 hops, or p",
            (
                Parameter(
                    "expanded",
                    "choice",
                    "no",
                    "send keys and values repeated for every query head, as published code does",
                    choices=("no", "yes"),
                ),
                Parameter(
                    "rotation",
                    "choice",
                    "partial",
                    "p-1 hops, or p with the own shard travelling home again, as published code does",
                    choices=("partial", "full"),
                ),
            ),
            fused=True,
            kind="baseline",
        ),
        Scheme(
            "query_ring",
            _query_ring,
            "(p-1) (alpha + n/p beta) + alpha + (p-1) n/p beta",
            fused=True,
            kind="baseline",
        ),
        Scheme(
            "three_allreduce",
            _three_allreduce,
            "three library all-reductions of n/(d+2), n/(d+2) and n d/(d+2) bytes (head_dim d)",
            kind="baseline",
        ),
        Scheme(
            "two_allreduce",
            _two_allreduce,
            "two library all-reductions of n/(d+2) and n (d+1)/(d+2) bytes (head_dim d)",
            kind="baseline",
        ),
        Scheme(
            "head_all_to_all",
            _head_all_to_all,
            "one library all-to-all of n (p-1)/p bytes per rank",
            scattered=True,
            kind="baseline",
        ),
    )
}


def plan(
    comm: Intracomm,
    scheme: str,
    shape: Shape,
    attention: Callable[..., None],
    scale: float,
    merge: Any,
    records: Any,
    reduced: Any,
) -> tuple[Callable[..., None], Any]:
    """(attention, reducer) of a baseline, as `treeattn.decoder.plan.plan` returns them. Collective.

    The reducer tells in `sent` what this rank hands to MPI in a step.
    """
    name, given = parse(scheme, BASELINES)
    row = BASELINES[name]
    assert row.generator is not None
    parameters = {p.name: given.get(p.name, p.default) for p in row.parameters}
    parts: tuple[Callable[..., None], Any] = row.generator(
        Job(comm, shape, attention, scale, merge, records, reduced), **parameters
    )
    return parts
