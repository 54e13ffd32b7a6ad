"""How partials are merged over the ranks, as every verb is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treeattn.collectives.catalog import DEVICES
from treeattn.collectives.schedule import Schedule
from treeattn.errors import ArgumentError

__all__ = ["EXECUTORS", "MPI_EXECUTORS", "Reduction"]

#: The names that ``executor=`` takes: for ranks of MPI, the fastest first, and for those of process groups.
MPI_EXECUTORS = ("slots", "program", "mpi")
EXECUTORS = (*MPI_EXECUTORS, "torch")


@dataclass(frozen=True, slots=True)
class Reduction:
    """How partials are merged over the ranks; goes wherever `scheme` goes, equal on all ranks.

    Parameters
    ----------
    scheme : str or Schedule
        A name with its parameters (`treeattn.schemes`), or a schedule of one's own; "auto" chooses by
        simulation.
    transport : str, optional
        How records travel: "mpi" from the host, which over a process group is torch's messages; from GPUs
        "nccl", "peer", "cuda-mpi" or "host" (staged through page-locked memory). None is the only sensible
        one, or an error that lists them.
    executor : str, optional
        What runs the rounds of a schedule on the host: "slots" or "program", compiled, or Python: "mpi" or,
        over a process group, "torch". None is the fastest that all ranks can have; the bits are the same.
    output : str
        "replicated": every rank gets all heads. "heads" (schemes `head_scatter`, `head_all_to_all`): rank r
        of p gets the heads r*heads//p up to (r+1)*heads//p. "root" (any schedule): rank 0 gets all heads, the
        others (None, None), for the messages of the schedule that lead to rank 0: half of them in a tree.
    progress : str
        What moves messages between `Decoder.begin` and `finish`: "calls" of begin, test and finish, or a
        "thread", which wants a core of its own (device="cpu").
    groups : int or "auto"
        A step is taken apart into so many groups of heads, a divisor of kv_heads, and the records of one
        travel while the next is attended (device="cpu"); "auto" takes what was the fastest in the first
        steps.

    Raises
    ------
    ArgumentError
        A value that cannot be; the message names it.
    """

    scheme: str | Schedule = "hierarchical"
    transport: str | None = None
    executor: str | None = None
    output: str = "replicated"
    progress: str = "calls"
    groups: int | str = 1

    _CHOICES: ClassVar[dict[str, tuple[str | None, ...]]] = {
        "transport": (*DEVICES, None),
        "executor": (*EXECUTORS, None),
        "output": ("replicated", "heads", "root"),
        "progress": ("calls", "thread"),
    }

    def __post_init__(self) -> None:
        if not isinstance(self.scheme, str | Schedule):
            raise ArgumentError(f"scheme must be a name or a Schedule, not {self.scheme!r:.60}")
        for name, choices in self._CHOICES.items():
            value = getattr(self, name)
            if not any(value is choice or value == choice for choice in choices):
                use = ", ".join(map(repr, choices))
                raise ArgumentError(f"{name} {value!r:.60} is unknown: use one of {use}")
        if self.groups != "auto" and not (type(self.groups) is int and self.groups > 0):
            raise ArgumentError(f"groups {self.groups!r:.60}: a positive whole number, or 'auto', is needed")

    @classmethod
    def of(cls, scheme: str | Schedule | Reduction) -> Reduction:
        """What ``scheme=`` was given, as a `Reduction`."""
        return scheme if isinstance(scheme, Reduction) else cls(scheme)
