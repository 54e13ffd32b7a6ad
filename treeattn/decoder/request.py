"""What a rank asks for, and which options exclude each other: one table, checked before planning."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from treeattn.attention.arguments import Rules
from treeattn.attention.shape import Shape, check_number
from treeattn.backends.device import Device
from treeattn.collectives.catalog import DEVICES, Selection
from treeattn.collectives.schedule import Schedule
from treeattn.decoder.mask_plan import DeclaredPositions
from treeattn.errors import ArgumentError, RestrictionError

Call = TypeVar("Call", bound=Callable[..., Any])

#: The names that ``executor=`` takes: for ranks of MPI, the fastest first, and for those of process groups.
MPI_EXECUTORS = ("slots", "program", "mpi")
EXECUTORS = (*MPI_EXECUTORS, "torch")


# Where the reduction attends, too, there are no tables of a mask, and one kernel for rows of one type.
_ALL = "lets every query see every token: {0} need another scheme, and groups=1"
_ROWS = "takes the tokens of a shard in a row: a paged cache needs another scheme, and groups=1"
_ONE_TYPE = "takes q, k and v of one type: {types} needs another scheme, and groups=1"
_LACKING = {name: _ALL.format(f"{{{name}}}") for name in ("rules", "mask", "begins")}
_LACKING |= {"pages": _ROWS, "types": _ONE_TYPE}

_SLICES = "{slices} leaves each rank its slice of heads: from Python, with output='heads'"
_ROOTED = "{rooted} leaves its result on rank 0: from Python, with output='root'"

#: Two properties of what is asked for (`Request.properties`) -> why they do not go together, and what to do.
#: Words in braces are the properties as this request has them.
INCOMPATIBLE = {
    ("reproducible", "float64"): (
        "reproducible= is for results of float32: float64 is summed in whatever order"
    ),
    ("reproducible", "sum"): (
        "{sum} folds in an order of its own: reproducible= needs a schedule, such as hierarchical, or "
        "mpi_allreduce, whose operator is ours"
    ),
    ("blocks", "mask"): (
        "a mask is of draft tokens, which are dealt out one by one: reproducible='tokens' serves them"
    ),
    ("groups", "cuda"): "groups of heads are for device='cpu': a GPU's stream does one thing at a time",
    ("groups", "ring"): "{ring} cannot be taken apart: use groups=1",
    ("groups", "heads"): "a result with output='heads' cannot be taken apart: use groups=1",
    ("groups", "root"): "a result with output='root' cannot be taken apart: use groups=1",
    ("ring", "v_dim"): (
        "{ring} attends while it communicates, to keys and values of one width: v_dim needs another scheme"
    ),
    **{("ring", name): f"{{ring}} {why}" for name, why in _LACKING.items()},
    **{("groups", name): f"a step by groups of heads {why}" for name, why in _LACKING.items()},
    ("folds", "heads"): "output='heads' is for treeattn.Decoder, and {folds}",
    ("folds everywhere", "root"): "output='root' is for treeattn.Decoder, and {folds}",
    ("folds", "groups"): "{groups} is for treeattn.Decoder, and {folds}",
    ("folds", "ring"): (
        "{ring} attends while it communicates, and {folds}: take another scheme, such as hierarchical"
    ),
    ("folds", "slices"): (
        "{slices} leaves each rank a slice of heads, and {folds}: take another scheme, such as hierarchical"
    ),
    ("slices", "replicated"): _SLICES,
    ("slices", "root"): _SLICES,
    ("rooted", "replicated"): _ROOTED,
    ("rooted", "heads"): _ROOTED,
    ("no schedule", "root"): (
        "{no schedule} is no schedule, of which output='root' takes the part that leads to rank 0: take "
        "scheme='hierarchical', say"
    ),
    ("whole", "heads"): (
        "{whole} leaves every rank all heads; scheme='head_scatter' or scheme='head_all_to_all' serves "
        "output='heads'"
    ),
}


def refuse(properties: Mapping[str, object]) -> None:
    """Raise `RestrictionError` where two of what is true of these exclude each other."""
    true = {name for name, what in properties.items() if what}
    for pair, why in INCOMPATIBLE.items():
        if true.issuperset(pair):
            raise RestrictionError(why.format(**properties))


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
        "nccl", "peer", "cuda-mpi" or "host" (staged through page-locked memory). None is "mpi" from the host;
        from GPUs "peer" (within nodes, with NCCL between them) or else "nccl", tried on all ranks and said in
        a line of standard error.
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

    Examples
    --------
    >>> how = treeattn.Reduction("k_nomial_tree:radix=4", output="root")
    >>> how.scheme, how.output, how.groups
    ('k_nomial_tree:radix=4', 'root', 1)
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


def of_reduction(how: Reduction, scheme: Selection) -> dict[str, object]:
    """What `refuse` asks of a scheme and of how it is to run: properties by name."""
    row = scheme.row
    return {
        how.output: True,
        "groups": how.groups != 1 and f"groups={how.groups}",
        "ring": row.fused and scheme.text,
        "no schedule": row.module and row.name,
        "sum": row.module and not row.compiled and row.name,
        "slices": row.result == "scattered" and row.name,
        "rooted": row.result == "root" and row.name,
        "whole": row.result == "replicated" and row.name,
    }


@dataclass(frozen=True, slots=True)
class Request:
    """What a rank asks for. What `settings` names must be the same on every rank.

    declared: of this rank's tokens. seen: what the one step that follows brings of q_positions, begins and
    mask, by name, and a digest of what must be the same of it.
    """

    shape: Shape
    how: Reduction
    scheme: Selection
    scale: float | None
    device: Device
    q_root: int | None = None
    rules: Rules = field(default_factory=Rules)
    reproducible: str | None = None
    declared: DeclaredPositions = field(default_factory=DeclaredPositions)
    seen: Mapping[str, str] = field(default_factory=dict)

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
            "the layout of positions": self.asks_positions and self.declared.layout,
            "q_positions": self.seen.get("q_positions"),
            "begins": self.seen.get("begins"),
        }

    @property
    def properties(self) -> dict[str, object]:
        """What `refuse` asks, by name: as an error says it, or nothing where it is not so."""
        shape = self.shape
        return of_reduction(self.how, self.scheme) | {
            "cuda": self.device.stream is not None,
            "reproducible": self.reproducible,
            "blocks": self.reproducible == "blocks",
            "float64": shape.dtype == "float64",
            "v_dim": shape.v_dim != shape.head_dim,
            "pages": shape.page_size is not None,
            "types": shape.mixed and f"a cache of {shape.kv_dtype} under queries of {shape.dtype}",
            "rules": ", ".join(self.rules.names),
            "mask": "mask" in self.seen and "mask",
            "begins": "begins" in self.seen and "begins",
        }

    def check(self) -> None:
        """Raise `ArgumentError` or `RestrictionError` where its parts do not go together."""
        groups, kv_heads = self.how.groups, self.shape.kv_heads
        if kv_heads % groups:
            raise ArgumentError(f"groups = {groups}: a number that divides the {kv_heads} KV heads is needed")
        refuse(self.properties)

    @property
    def attends_by_reducer(self) -> bool:
        """Whether the reduction attends, too: a ring does, and a step by groups of heads."""
        return self.scheme.row.fused or self.how.groups != 1

    @property
    def asks_positions(self) -> bool:
        """Whether ranks must know of each other's tokens."""
        if self.reproducible == "blocks" or self.declared.positions is not None:
            return True
        return self.rules.positional or "begins" in self.seen

    @property
    def logit_scale(self) -> float:
        """`scale`, or the default. Raises `ArgumentError` unless the records' type can hold it."""
        return self.shape.logit_scale(self.scale)


#: Words of other libraries -> ours; and arguments of what `rules=` and `k=` take.
_WORDS = {"softmax_scale": "scale", "sm_scale": "scale", "num_heads": "heads", "num_kv_heads": "kv_heads"}
_WORDS |= {"attn_mask": "mask", "group": "comm", "cache_seqlens": "lengths", "seq_lens": "lengths"}
_RULES = {"is_causal": "causal", "window_size": "window", "sliding_window": "window", "softcap": "softcap"}
_RULES |= {name: name for name in ("causal", "window", "leading", "alibi", "sink_logits")}
_SHARD = ("positions", "block_table", "k_scale", "v_scale", "v_dim", "draft_positions")


def telling_arguments(call: Call) -> Call:
    """Make a call tell, of a keyword argument that it has not, which one is meant: a `TypeError`."""
    known = inspect.signature(call).parameters

    @functools.wraps(call)
    def called(*given: Any, **named: Any) -> Any:
        for name in named.keys() - known.keys():
            near = [_WORDS.get(name), *difflib.get_close_matches(name, known, 1)]
            meant = next((f"{one}=" for one in near if one in known), "")
            if name in _RULES and "rules" in known:
                meant = f"rules=treeattn.Rules({_RULES[name]}=..)"
            elif name in _SHARD and "k" in known:
                meant = f"treeattn.Shard(k, v, {name}=..) in place of k"
            hint = f": did you mean {meant}?" if meant else f": take {', '.join(known)}"
            raise TypeError(f"{call.__qualname__.split('.')[0]} has no argument {name!r:.60}{hint}")
        return call(*given, **named)

    return called  # type: ignore[return-value]
