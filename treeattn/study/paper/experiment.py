"""What an experiment is: functions from a setting to tables. What the tables mean stands in docs/paper.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
