"""What experiments share: tables, and where the paper's settings are simulated."""

from __future__ import annotations

from typing import NamedTuple

from treeattn import collectives
from treeattn.collectives import Schedule
from treeattn.collectives.clusters import placement
from treeattn.collectives.clusters.description import Cluster

#: The shipped description of the paper's cluster.
MACHINE = "dgx-h100"

#: What stands where the paper has a mark in a figure; no number was read off one.
IN_THE_FIGURE = "in the figure"


class Table(NamedTuple):
    """rows: by heading, which names the unit and says whose number it is, a number, words in place of one, or
    None: not measured, or not said."""

    title: str
    rows: list[dict[str, float | str | None]]


def shown(value: float | str | None) -> str:
    """A cell as text: whole numbers in full, others to 4 significant digits."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2e}" if abs(value) < 1e-3 else f"{value:.4g}"


def placed(cluster: Cluster, scheme: str, ranks: int) -> tuple[Schedule, placement.Placement]:
    """A schedule for ranks of which neighbours share nodes, and where they sit."""
    places = placement.block(cluster, ranks)
    nodes = placement.node_groups(cluster, places) if collectives.needs_nodes(scheme) else None
    return collectives.build(scheme, ranks, nodes=nodes), places
