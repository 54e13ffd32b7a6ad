"""From the name of a scheme to what a step runs: who computes the partials, who folds them.

A scheme is a schedule, which an executor runs; a library's own reduction; or a baseline, which may also
compute partials while it communicates. This is the only place that knows all three.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from treeattn import baselines, collectives
from treeattn import comm as comm_
from treeattn.attention.shape import Shape
from treeattn.collectives import catalog
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import transport as transports
from treeattn.decoder.device import Device
from treeattn.errors import RestrictionError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = [
    "CATALOG",
    "Reduction",
    "Route",
    "canonical",
    "check_output",
    "fused",
    "plan",
    "scattered",
    "schedule",
]

#: Every scheme that ``scheme=`` takes: schedules, library reductions, baselines.
CATALOG = catalog.CATALOG | baselines.BASELINES


class Reduction(Protocol):
    """Folds the records of all ranks, in place. A call, creating and closing are collective."""

    def __call__(self) -> None:
        """One step."""

    def close(self) -> None:
        """Release what it holds."""

    def __exit__(self, *exception: object) -> None:
        """`close`, or after an exception what this rank can release alone."""


class Route(NamedTuple):
    """What a step runs, in this order."""

    attention: Callable[[Any, Any, Any, Any], None]
    """Called with q, k, v and lengths: writes the partials, or begins to."""
    reducer: Any
    """A `Reduction`."""
    transport: str = "mpi"
    """How the reducer's records travel."""


def canonical(scheme: str) -> str:
    """The one spelling of any scheme. Raises `ScheduleError`."""
    return catalog.canonical(scheme, CATALOG)


def _row(scheme: str) -> catalog.Scheme:
    return CATALOG[catalog.parse(scheme, CATALOG)[0]]


def schedule(scheme: str, comm: Intracomm) -> Schedule | None:
    """The schedule of `scheme` for `comm`; node groups come from the machine where they are not given.

    None for a scheme that has none: a library's reduction, a baseline. Collective.
    """
    if _row(scheme).kind != "schedule":
        return None
    nodes = comm_.node_groups(comm) if collectives.needs_nodes(scheme) else None
    return _built(scheme, comm.size, nodes)


@functools.lru_cache(maxsize=32)
def _built(scheme: str, size: int, nodes: tuple[tuple[int, ...], ...] | None) -> Schedule:
    return collectives.build(scheme, size, **({} if nodes is None else {"nodes": nodes}))


def scattered(scheme: str) -> bool:
    """Whether the scheme leaves each rank its slice of heads only."""
    return _row(scheme).scattered


def fused(scheme: str) -> bool:
    """Whether the scheme attends while it communicates, so that it has no reduction apart from the step."""
    return _row(scheme).fused


def check_output(scheme: str, output: str) -> None:
    """Raise `RestrictionError` unless the scheme leaves its result where `output` wants it."""
    slices = scattered(scheme)
    if slices and output == "replicated":
        raise RestrictionError(
            f"{scheme} leaves each rank its slice of heads: from Python, with output='heads'"
        )
    if not slices and output == "heads":
        offer = " or ".join(f"scheme='{row.name}'" for row in CATALOG.values() if row.scattered)
        raise RestrictionError(f"{scheme} leaves every rank all heads; {offer} serves output='heads'")


def plan(
    comm: Intracomm,
    device: Device,
    transport: str | None,
    scheme: str,
    schedule: Schedule | None,
    shape: Shape,
    scale: float,
    attention: Any,
    records: Any,
    reduced: Any,
) -> Route:
    """The attention that writes `records` and the reduction of `reduced`. Collective.

    attention: what writes `records` where nothing is communicated meanwhile.
    records: [batch, heads, queries, head_dim + 2]. reduced: the same array, or one that is cut by heads
    [heads, batch, queries, head_dim + 2], into which the caller reorders between the two.
    """
    row = _row(scheme)
    chosen = transports.choose(device.name, transport, row, comm.size)
    merge = device.merge_operator(shape.head_dim, shape.record_dtype)
    if row.kind == "baseline":
        return Route(*baselines.plan(comm, scheme, shape, attention, scale, merge, records, reduced))
    reduction = transports.Reduction(scheme, schedule, merge, reduced, shape.batch * shape.queries)
    return Route(attention, transports.reducer(comm, chosen, device, reduction), chosen)
