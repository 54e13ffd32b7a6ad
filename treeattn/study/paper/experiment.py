"""What an experiment is: the paper's setting and numbers, a setting small enough to run anywhere, a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["NO_SIMULATOR", "Cell", "Claim", "Experiment", "Table", "shown"]

#: What stands where a prediction of a simulated cluster belongs.
NO_SIMULATOR = "no simulator in this version"

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
class Claim:
    """A number that the paper states. says: in its words; value: to compare with, in `unit`; where: place."""

    what: str
    says: str
    value: float
    unit: str
    where: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one cell for each heading; headings name units and say whose number it is."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.headings):
                raise ValueError(f"{self.title}: {len(row)} cells under {len(self.headings)} headings")


@dataclass(frozen=True)
class Experiment(ABC):
    """One experiment of Shyam et al., "Tree Attention", arXiv 2408.04093v4.

    name: what it is about, as the command takes it. where: its place in the paper. Subclasses have `paper`,
    the paper's setting, and `small`, one of the same type that runs for real on a few ranks. predictions:
    the paper's setting on a simulated cluster.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    where: ClassVar[str]
    claims: ClassVar[tuple[Claim, ...]] = ()
    #: What the model takes for granted.
    assumptions: ClassVar[tuple[str, ...]] = ()
    #: Why the numbers differ, and which of the paper's numbers are not explained.
    differences: ClassVar[tuple[str, ...]] = ()

    paper: Any
    small: Any
    predictions: str = NO_SIMULATOR

    @abstractmethod
    def model(self) -> list[Table]:
        """The paper's setting: its numbers beside the model's. Needs no MPI."""

    @abstractmethod
    def measure(self, comm: Intracomm) -> list[Table]:
        """The small setting, run on `comm`; tables on rank 0, nothing elsewhere. Collective."""

    def claim(self, what: str) -> Claim:
        """The claim of that name."""
        return next(claim for claim in self.claims if claim.what == what)
