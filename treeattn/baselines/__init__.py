"""Other ways to the same result, to measure against: what is published, and what serving engines do.

One file each, exact and tested like the rest. A baseline is a row here and is named in ``scheme=`` like a
schedule. It is either a reduction of finished partials, or a ring that computes while it communicates: then
its ``plan`` takes what it attends with too, and what it plans has a ``take`` for the arrays of a step.
"""

from __future__ import annotations

from typing import Any

from treeattn.collectives.catalog import Scheme
from treeattn.collectives.parameters import Parameter

__all__ = ["BASELINES"]


def _baseline(name: str, description: str, cost: str, *parameters: Parameter, **fields: Any) -> Scheme:
    return Scheme(
        name,
        parameters,
        cost,
        description=description,
        module=f"treeattn.baselines.{name}",
        transports=("mpi",),
        **fields,
    )


BASELINES: dict[str, Scheme] = {
    row.name: row
    for row in (
        _baseline(
            "kv_ring",
            "Ring Attention: keys and values travel, and every rank attends to all of them.",
            "h (alpha + 2 S beta), S bytes of one shard's keys or values; h = p-1 hops, or p",
            Parameter(
                "rotation",
                "choice",
                "partial",
                "p-1 hops, or p with the own shard travelling home again, as published code does",
                choices=("partial", "full"),
            ),
            fused=True,
        ),
        _baseline(
            "query_ring",
            "Slices of the query heads pass by the shards and collect each one's contribution (pass-Q).",
            "(p-1) (alpha + n/p beta) + alpha + (p-1) n/p beta",
            fused=True,
        ),
        _baseline(
            "three_allreduce",
            "The library's all-reduction three times: max, sum of denominators, sum of numerators.",
            "three library all-reductions of n/(d+2), n/(d+2) and n d/(d+2) bytes (head_dim d)",
        ),
        _baseline(
            "two_allreduce",
            "The library's all-reduction twice: max, then one sum of denominators and numerators.",
            "two library all-reductions of n/(d+2) and n (d+1)/(d+2) bytes (head_dim d)",
        ),
        _baseline(
            "head_all_to_all",
            "One packed exchange: each rank merges its slice of heads; what serving engines do.",
            "one library all-to-all of n (p-1)/p bytes per rank",
            result="scattered",
        ),
    )
}
