"""Other ways to the same result, to measure against: what is published, and what serving engines do.

One file each, exact and tested like the rest. A baseline is a row here and is named in ``scheme=`` like a
schedule. It is either a reduction of finished partials, or a ring that computes while it communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from treeattn.arguments import Shape
from treeattn.collectives.catalog import Scheme, parse
from treeattn.errors import ScheduleError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["BASELINES", "plan"]

BASELINES: dict[str, Scheme] = {}


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
    """(attention, reducer) of a baseline, as `treeattn.routes.plan` returns them. Collective."""
    name, _ = parse(scheme, BASELINES)
    raise ScheduleError(f"{name} has no plan")
