"""Other ways to the same result, to measure against: what is published, and what serving engines do.

One file each, exact and tested like the rest. A baseline is a row here and is named in ``scheme=`` like a
schedule. It is either a reduction of finished partials, or a ring that computes while it communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from treeattn.arguments import Shape
from treeattn.baselines.sent import Sent
from treeattn.collectives.catalog import Scheme, parse

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


BASELINES: dict[str, Scheme] = {
    row.name: row
    for row in (
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
    """(attention, reducer) of a baseline, as `treeattn.routes.plan` returns them. Collective.

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
