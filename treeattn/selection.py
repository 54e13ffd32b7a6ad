"""What ``scheme=`` takes: names of the catalogue and of the baselines, and schedules of one's own."""

from __future__ import annotations

import functools

from treeattn.baselines import BASELINES
from treeattn.collectives import catalog
from treeattn.collectives.catalog import Selection
from treeattn.collectives.schedule import Schedule

#: Every scheme that ``scheme=`` takes: schedules, library reductions, baselines.
CATALOG = catalog.CATALOG | BASELINES


def schemes() -> list[str]:
    """Every name that ``scheme=`` takes.

    >>> {"binary_tree", "mpi_allreduce", "kv_ring"} <= {*treeattn.schemes()}
    True
    """
    return [*CATALOG]


def select(scheme: str | Schedule) -> Selection:
    """What ``scheme=`` asks for. Raises `ScheduleError`."""
    return named(scheme) if isinstance(scheme, str) else catalog.select(scheme, CATALOG)


@functools.lru_cache(maxsize=256)
def named(scheme: str) -> Selection:
    """What such a name asks for, read once. Raises `ScheduleError`."""
    return catalog.select(scheme, CATALOG)
