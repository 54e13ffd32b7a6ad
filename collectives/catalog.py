"""THE list of schemes. Commands, tests, docs and `treeattn.schemes()` all derive from it.

A scheme is one file in `schemes/` with a pure function ``size, **parameters -> Schedule`` of the same name,
and one row here. A scheme string is ``name:key=value:key=value``; lists are ``4+4+2``; a scheme
inside a scheme is written in parentheses: ``hierarchical:inner=(k_nomial_tree:radix=4):outer=ring``.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from treeattn.collectives import parameters
from treeattn.collectives.combinators import to_root
from treeattn.collectives.parameters import Parameter, Value
from treeattn.collectives.schedule import TRANSFER_LIMIT, Result, Schedule
from treeattn.errors import RestrictionError, ScheduleError

if TYPE_CHECKING:
    from treeattn.collectives.runtime.reducer import Reducer

#: How records travel -> where they lie.
DEVICES = {"mpi": "cpu", "nccl": "cuda", "peer": "cuda", "cuda-mpi": "cuda", "host": "cuda"}
#: Runners of a schedule, as `Reducer.executor` and cluster files name them: on the host, and on GPUs.
EXECUTORS = ("slots", "program", "mpi", "nccl", "peer", "peer_nccl")
#: Transport from GPUs -> who runs schedules over it; from the host a cluster has a choice of its own.
EXECUTOR_OVER = {"nccl": "nccl", "peer": "peer", "cuda-mpi": "mpi", "host": "mpi"}


@dataclass(frozen=True, slots=True)
class Scheme:
    """One row of the catalogue.

    cost: time of a reduction of n bytes over p ranks; alpha is the latency of a message, beta the time
    per byte. aliases: the literature's names, which are read as this one. rooted: gathers at rank 0, then
    copies back down, so it can be the inner scheme of another. result: where it is left
    (`Schedule`); who asks for "root" gets what of a replicated one leads there.
    generator: makes its schedule of a number of ranks and parameters. Rows of kind ``"library"`` have none:
    the library decides what it does, `description` says what is known; nor have those of kind
    ``"baseline"``, which are listed in `treeattn.baselines`. Both name the `module` that
    plans them. compiled: it calls the operator's compiled form. fused: attends while it communicates, so it
    has no reduction of its own; its `plan` takes more (`treeattn.baselines`).
    transports: how its records can travel.
    """

    name: str
    parameters: tuple[Parameter, ...] = ()
    cost: str = ""
    generator: Callable[..., Schedule] | None = None
    aliases: tuple[str, ...] = ()
    restriction: str = "none"
    rooted: bool = False
    result: Result = "replicated"
    fused: bool = False
    description: str = ""
    module: str = ""
    compiled: bool = False
    transports: tuple[str, ...] = tuple(DEVICES)

    @property
    def kind(self) -> Literal["schedule", "library", "baseline"]:
        """What it is, by who plans it."""
        if not self.module:
            return "schedule"
        return "library" if self.module.startswith("treeattn.collectives.") else "baseline"

    @property
    def scattered(self) -> bool:
        """Whether it leaves rank r of p only the r-th of p slices of the result."""
        return self.result == "scattered"

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(DEVICES[transport] for transport in self.transports))

    @property
    def plan(self) -> Callable[..., Reducer]:
        """What plans a library or baseline, of a `ReductionSpec` and the parameters; imported now: naming
        schemes needs no MPI library."""
        planner: Callable[..., Reducer] = importlib.import_module(self.module).plan
        return planner

    @property
    def summary(self) -> str:
        """One line: what the scheme is."""
        return self.description or (self.generator.__doc__ or "").strip().partition("\n")[0]

    def parameter(self, name: str) -> Parameter | None:
        return next((parameter for parameter in self.parameters if parameter.name == name), None)


class Selection(NamedTuple):
    """A scheme that was asked for, read once: its row, the parameters that were given, its one spelling.

    own: a schedule that was asked for by itself, in place of a name.
    """

    row: Scheme
    given: tuple[tuple[str, Value], ...]
    text: str
    own: Schedule | None = None

    @property
    def parameters(self) -> dict[str, Value]:
        """All parameters, defaults among them."""
        return {p.name: p.default for p in self.row.parameters} | dict(self.given)

    @property
    def needs_nodes(self) -> bool:
        """Whether it is shaped by node groups that were not given."""
        return self.row.parameter("nodes") is not None and "nodes" not in dict(self.given)

    @property
    def digest(self) -> str | None:
        """A digest of a schedule of one's own, equal for equal ones; None for a name."""
        return None if self.own is None else hashlib.sha256(self.own.to_json().encode()).hexdigest()[:16]

    def build(self, size: int, nodes: object = None, result: Result = "replicated") -> Schedule:
        """Its schedule over `size` ranks. nodes: what a scheme that `needs_nodes` is shaped by, sizes or
        ranks of each. Other arguments and errors are those of `build` below."""
        if self.own is not None:
            return with_result(self.own, result)
        row, chosen = self.row, self.parameters
        if self.needs_nodes and nodes is not None:
            chosen["nodes"] = _read(row, "nodes", nodes)
        if row.generator is None:
            known = ", ".join(names("schedule"))
            raise ScheduleError(
                f"{row.name} is a reducer of a library and has no schedule; schedules: {known}"
            )
        if not isinstance(size, int) or size < 1:
            raise ScheduleError(
                f"{row.name}: size={size!r} is not a number of ranks: it must be an integer from 1 up"
            )
        if size > parameters.RANK_LIMIT:
            raise RestrictionError(
                f"{row.name}: {size} ranks are more than the {parameters.RANK_LIMIT} of a plan"
            )
        arguments = {p.name: _argument(row, p, chosen[p.name], size) for p in row.parameters}
        return with_result(replace(row.generator(size, **arguments), name=_spell(row, chosen)), result)


_RADIX = Parameter("radix", "integer", 2, "branches of the tree", low=2)
_NODES = Parameter("nodes", "nodes", None, "ranks that share a node; without it one node holds all ranks")
_LEADERS = Parameter("leaders", "integer", 2, "parts of the records, each with a leader in every node")
_FORMS = ("latency", "bandwidth")
_FORM = Parameter("form", "choice", "latency", "whole records, or halves and back", choices=_FORMS)
_RAIL = Parameter("rail", "scheme", "recursive_doubling", "scheme along each rail")
_SQUARE = f"refused above {TRANSFER_LIMIT} transfers: at most {{}} ranks"
_RAIL_LIMIT = "rail must leave its result on every rank; " + _SQUARE.format("about 512") + " per node"


def complete(row: Scheme) -> Scheme:
    """The row of a schedule with what its file says: the function of its name, whose file's head states the
    cost."""
    if row.module:
        return row
    module = importlib.import_module(f"treeattn.collectives.schemes.{row.name}")
    cost = (module.__doc__ or "").partition("\nCost: ")[2].partition("\n")[0]
    return replace(row, cost=cost, generator=getattr(module, row.name))


CATALOG: dict[str, Scheme] = {
    row.name: complete(row)
    for row in (
        Scheme("chain", rooted=True),
        Scheme("binary_tree", rooted=True),
        Scheme("k_ary_tree", (_RADIX,), rooted=True),
        Scheme("k_nomial_tree", (_RADIX,), rooted=True, aliases=("binomial_tree",)),
        Scheme(
            "double_binary_tree",
            (Parameter("chunks", "integer", 1, "pieces that each tree's half is pipelined in"),),
            restriction=f"refused above {TRANSFER_LIMIT} transfers: 4 chunks (p-1)",
            aliases=("two_tree",),
        ),
        Scheme(
            "logp_optimal",
            (
                Parameter("latency", "integer", 1600, "time a message is under way", low=0),
                Parameter("overhead", "integer", 200, "time it takes sender and receiver", low=0),
                Parameter("gap", "integer", 500, "time between the starts of a rank's messages"),
            ),
            rooted=True,
        ),
        Scheme("recursive_doubling"),
        Scheme(
            "recursive_multiplying",
            (Parameter("factors", "integers", None, "group size of each round, near first", low=2),),
            restriction="the product of the factors is at most the number of ranks",
        ),
        Scheme("ring", restriction=_SQUARE.format(512)),
        Scheme(
            "reduce_scatter_gather",
            (Parameter("order", "choice", "far", "distance of the first partner", choices=("far", "near")),),
            aliases=("rabenseifner",),
        ),
        Scheme("bine", (_FORM,)),
        Scheme("circulant"),
        Scheme("elimination", aliases=("three_two_elimination",)),
        Scheme(
            "all_gather_trees",
            restriction=_SQUARE.format(512) + " if p is odd, more if 2, 4, .. divide it",
            aliases=("pat",),
        ),
        Scheme(
            "hierarchical",
            (
                Parameter("inner", "tree", "binary_tree", "rooted scheme within each node"),
                Parameter("outer", "scheme", "recursive_doubling", "scheme across the leaders"),
                _NODES,
            ),
            restriction="outer must leave its result on every rank",
        ),
        Scheme(
            "split_rail", (_RAIL, _NODES), restriction=_RAIL_LIMIT, aliases=("rail_aligned", "blueconnect")
        ),
        Scheme("multi_leader", (_LEADERS, _RAIL, _NODES), restriction=_RAIL_LIMIT, aliases=("dpml",)),
        Scheme("uneven_nodes", (_RAIL, _NODES), restriction=_RAIL_LIMIT, aliases=("ahc",)),
        Scheme("head_scatter", result="scattered"),
        Scheme("all_gather_merge", restriction=_SQUARE.format(724), aliases=("one_shot",)),
        Scheme(
            "mpi_allreduce",
            cost="the library's",
            description="whatever the library chooses for this size and machine",
            module="treeattn.collectives.libraries.mpi_allreduce",
            compiled=True,
            transports=("mpi", "host"),
        ),
        Scheme(
            "nccl_allreduce",
            (
                Parameter(
                    "calls", "choice", "2", "all-reduces in a step; 3 as in the paper", choices=("2", "3")
                ),
            ),
            cost="the library's, of n/(d+2) bytes and then of n",
            restriction="device='cuda' only",
            description="NCCL's all-reduce of maxima, then of rescaled records: GPUs only; sums, not merges",
            module="treeattn.collectives.libraries.nccl_allreduce",
            transports=("nccl",),
        ),
    )
}


def names(kind: Literal["schedule", "library"] | None = None) -> list[str]:
    """All names, or those of one kind, in the order of the catalogue.

    >>> collectives.names()[:3], collectives.names("library")
    (['chain', 'binary_tree', 'k_ary_tree'], ['mpi_allreduce', 'nccl_allreduce'])
    """
    return [row.name for row in CATALOG.values() if kind in (None, row.kind)]


def select(scheme: str | Schedule, catalog: Mapping[str, Scheme] = CATALOG) -> Selection:
    """What `scheme` asks for: a scheme string, read by `catalog`, or a schedule of one's own.

    Raises `ScheduleError` for an unknown name or parameter, a bad value, or parentheses that do not match;
    the message names the remedy.
    """
    if isinstance(scheme, Schedule):
        scheme.check_types()
        return Selection(Scheme(scheme.name, result=scheme.result), (), scheme.name, scheme)
    if not isinstance(scheme, str):
        raise ScheduleError(f"{scheme!r} is not the name of a scheme; {_meant('', list(catalog))}")
    if not scheme.strip().isprintable():
        raise ScheduleError(f"{scheme!r:.80} is not the name of a scheme, which is one line of text")
    name, *assignments = parameters.split(scheme)
    row = next((row for row in catalog.values() if name.strip() in (row.name, *row.aliases)), None)
    if row is None:
        aliases = [alias for row in catalog.values() for alias in row.aliases]
        raise ScheduleError(
            f"there is no scheme {name.strip()!r:.80}; {_meant(name, list(catalog), aliases)}"
        )
    given: dict[str, Value] = {}
    for assignment in assignments:
        key, equals, value = map(str.strip, assignment.partition("="))
        if not equals:
            raise ScheduleError(f"{scheme!r:.80}: {assignment!r:.80} is not of the form key=value")
        if key in given:
            raise ScheduleError(f"{scheme!r:.80} gives {key} twice")
        given[key] = _read(row, key, value)
    return Selection(row, tuple(given.items()), _spell(row, given))


def needs_nodes(scheme: str) -> bool:
    """Whether the scheme is shaped by node groups that the string does not give.

    >>> collectives.needs_nodes("hierarchical"), collectives.needs_nodes("binary_tree")
    (True, False)
    """
    return select(scheme).needs_nodes


def build(scheme: str, size: int, *, result: Result = "replicated", **params: object) -> Schedule:
    """The schedule of `scheme` (a name or scheme string) over `size` ranks.

    Parameters come from the text or as keywords: ``build("k_nomial_tree", 16, radix=4)``. `nodes` may be
    a sequence of node sizes or of the ranks of each node; None is the default. ``result="root"`` is
    what of the schedule leads to rank 0, half the messages of a tree (`combinators.to_root`). Raises
    `ScheduleError` for what cannot be read and for library reducers, `RestrictionError` for what the
    scheme does not serve.

    >>> schedule = collectives.build("binary_tree", 5)  # -> merges, => copies
    >>> [[transfer.arrow for transfer in one] for one in schedule.rounds]
    [['3->1', '4->1'], ['1->0', '2->0'], ['0=>1', '0=>2'], ['1=>3', '1=>4']]
    """
    asked = select(scheme)
    if asked.own is not None:
        raise ScheduleError(f"{scheme!r:.80} is not the name of a scheme: it is a schedule already")
    given = dict(asked.given)
    for key, value in params.items():
        if value is not None and key in given:
            raise ScheduleError(f"{key} is given twice: in {scheme!r} and as an argument")
        if value is not None:
            given[key] = _read(asked.row, key, value)
    return asked._replace(given=tuple(given.items())).build(size, result=result)


def with_result(schedule: Schedule, result: Result) -> Schedule:
    """The schedule, or what of it leads to rank 0 if that is asked for. Raises as `to_root`."""
    return to_root(schedule) if result == "root" != schedule.result else schedule


def _read(row: Scheme, key: str, value: object) -> Value:
    """The value of a parameter in its one form, checked."""
    parameter = row.parameter(key)
    if parameter is None:
        hint = ", and parameters of an inner scheme go in parentheses: inner=(k_ary_tree:radix=4)"
        nested = any(other.kind in ("scheme", "tree") for other in row.parameters)
        meant = _meant(key, [other.name for other in row.parameters])
        raise ScheduleError(f"{row.name} has no parameter {key!r:.80}; {meant}{hint if nested else ''}")
    read = parameters.read(row.name, parameter, value)
    if parameter.kind not in ("scheme", "tree") or not isinstance(read, str):
        return read
    inner = select(read)
    if parameter.kind == "tree" and not inner.row.rooted:
        rooted = ", ".join(other.name for other in CATALOG.values() if other.rooted)
        raise ScheduleError(f"{row.name}: {key}={inner.row.name} gathers at no root; take one of {rooted}")
    if inner.row.kind != "schedule":
        raise ScheduleError(
            f"{row.name}: {key}={inner.row.name} is a reducer of a library and has no schedule"
        )
    return inner.text


def _argument(row: Scheme, parameter: Parameter, value: Value, size: int) -> object:
    """What the generator is called with: schemes become functions of a size, nodes become ranks."""
    if isinstance(value, str) and parameter.kind in ("scheme", "tree"):
        return partial(build, value)
    if not isinstance(value, int | str) and parameter.kind == "nodes":
        return parameters.groups(row.name, value, size)
    return value


def _spell(row: Scheme, given: Mapping[str, Value]) -> str:
    text = row.name
    for parameter in row.parameters:
        value = given.get(parameter.name, parameter.default)
        written = None if value == parameter.default else parameters.write(parameter, value)
        if written is not None:
            text += f":{parameter.name}={written}"
    return text


def _meant(word: str, known: list[str], aliases: Sequence[str] = ()) -> str:
    close = get_close_matches(word, [*known, *aliases], n=1)
    guess = f"did you mean {close[0]}? " if close else ""
    return guess + (f"known: {', '.join(known)}" if known else "it takes none")
