"""What a rank asks for, and whether one rank alone can tell that it cannot be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from treeattn.attention.mask import Rules
from treeattn.attention.shape import Shape, check_number
from treeattn.backends.device import Device
from treeattn.collectives.catalog import DEVICES, Selection
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import reproducible
from treeattn.decoder.sight import Stated
from treeattn.errors import ArgumentError, RestrictionError

#: The names that ``executor=`` takes: for ranks of MPI, the fastest first, and for those of process groups.
MPI_EXECUTORS = ("slots", "program", "mpi")
EXECUTORS = (*MPI_EXECUTORS, "torch")


@dataclass(frozen=True, slots=True)
class Reduction:
    """How partials are merged over the ranks; goes wherever `scheme` goes, equal on all ranks.

    Parameters
    ----------
    scheme : str or Schedule, optional
        A name with its parameters (`treeattn.schemes`), or a schedule of one's own. None is
        `recursive_doubling` where all ranks are on one node, `all_gather_merge` where they are GPUs of one
        node, and `hierarchical` on several nodes.
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
    groups : int
        A step is taken apart into so many groups of heads, a divisor of kv_heads, and the records of one
        travel while the next is attended (device="cpu").

    Raises
    ------
    ArgumentError
        A value that cannot be; the message names it.
    """

    scheme: str | Schedule | None = None
    transport: str | None = None
    executor: str | None = None
    output: str = "replicated"
    groups: int = 1

    _CHOICES: ClassVar[dict[str, tuple[str | None, ...]]] = {
        "transport": (*DEVICES, None),
        "executor": (*EXECUTORS, None),
        "output": ("replicated", "heads", "root"),
    }

    def __post_init__(self) -> None:
        if not isinstance(self.scheme, str | Schedule | None):
            raise ArgumentError(f"scheme must be a name or a Schedule, not {self.scheme!r:.60}")
        for name, choices in self._CHOICES.items():
            value = getattr(self, name)
            if not any(value is choice or value == choice for choice in choices):
                use = ", ".join(map(repr, choices))
                raise ArgumentError(f"{name} {value!r:.60} is unknown: use one of {use}")
        check_number("groups", self.groups)

    @classmethod
    def of(cls, scheme: str | Schedule | Reduction | None) -> Reduction:
        """What ``scheme=`` was given, as a `Reduction`."""
        return scheme if isinstance(scheme, Reduction) else cls(scheme)


@dataclass(frozen=True, slots=True)
class Request:
    """What a rank asks for. What `settings` names must be the same on every rank."""

    shape: Shape
    how: Reduction
    scheme: Selection
    scale: float | None
    device: Device
    q_root: int | None = None
    rules: Rules = field(default_factory=Rules)
    stated: Stated = field(default_factory=Stated)
    reproducible: str | None = None
    masked: bool = False  # of this rank alone: the one step that follows brings a mask

    @property
    def settings(self) -> dict[str, object]:
        """What is compared, by the names that an error gives it."""
        return {
            "q_root": self.q_root,  # first: a rank that broadcasts compares nothing else
            "page_size (None without a block_table)": self.shape.page_size,
            "the shape or dtype of q, k, v": self.shape,
            "scale": self.logit_scale,
            "scheme": self.scheme.text,
            f"the schedule {self.scheme.text}": self.scheme.own and self.scheme.digest,
            "device": self.device.name,
            "transport": self.how.transport,
            "executor": self.how.executor,
            "groups": self.how.groups,
            "output": self.how.output,
            "rules": self.rules,
            "reproducible": self.reproducible,
            "positions being known": self.asks_positions,  # then ranks exchange them
            "the layout of positions": self.asks_positions and self.stated.layout,
            "q_positions": self.stated.stands,
            "begins": self.stated.begins,
        }

    @property
    def attends_by_reducer(self) -> bool:
        """Whether the reduction attends, too: a ring does, and a step by groups of heads."""
        return self.scheme.row.fused or self.how.groups != 1

    @property
    def asks_positions(self) -> bool:
        """Whether ranks must know of each other's tokens."""
        stated = self.stated
        if self.reproducible == "blocks":
            return True
        return self.rules.positional or stated.positions is not None or stated.begins is not None

    @property
    def logit_scale(self) -> float:
        """`scale`, or the default. Raises `ArgumentError` unless the records' type can hold it."""
        return self.shape.logit_scale(self.scale)


def check(request: Request) -> None:
    """Raise `ArgumentError` or `RestrictionError` where its parts do not go together."""
    if request.reproducible is not None:
        reproducible.check(request)
    _check_groups(request)
    _check_rules(request)


def _check_groups(request: Request) -> None:
    """Raise `RestrictionError` where a step cannot be taken apart into groups of heads."""
    groups, kv_heads = request.how.groups, request.shape.kv_heads
    if groups == 1:
        return
    if kv_heads % groups:
        raise ArgumentError(f"groups = {groups}: a number that divides the {kv_heads} KV heads is needed")
    if request.device.stream is not None:
        raise RestrictionError(
            "groups of heads are for device='cpu': a GPU's stream does one thing at a time"
        )
    if request.scheme.row.fused or request.how.output != "replicated":
        raise RestrictionError(
            f"{request.scheme.text} with output={request.how.output!r} cannot be taken apart: use groups=1"
        )


def _check_rules(request: Request) -> None:
    """Raise `RestrictionError` where attention happens in a place of no rules, one type and one width."""
    fused = request.scheme.row.fused
    if fused and request.shape.v_dim != request.shape.head_dim:
        raise RestrictionError(
            f"{request.scheme.text} attends while it communicates, to keys and values of one width: "
            "v_dim needs another scheme"
        )
    if not fused and request.how.groups == 1:
        return
    what = request.scheme.text if fused else "a step by groups of heads"
    rules = request.rules.names + ("mask",) * request.masked
    rules += ("begins",) * (request.stated.begins is not None)
    if rules:
        raise RestrictionError(
            f"{what} lets every query see every token: {', '.join(rules)} need another scheme, and groups=1"
        )
    if request.shape.page_size is not None:
        raise RestrictionError(
            f"{what} takes the tokens of a shard in a row: a paged cache needs another scheme, and groups=1"
        )
    if request.shape.mixed:
        raise RestrictionError(
            f"{what} takes q, k and v of one type: a cache of {request.shape.kv_dtype} under queries of "
            f"{request.shape.dtype} needs another scheme, and groups=1"
        )
