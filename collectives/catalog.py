"""THE list of schemes. Commands, tests, docs and `treeattn.schemes()` all derive from it.

A scheme is one file in `schemes/` with a pure function ``size, **parameters -> Schedule`` of the same
name, and one row here. A scheme string is ``name:key=value:key=value``; lists are ``4+4+2``; a scheme
inside a scheme stands in parentheses: ``hierarchical:inner=(k_nomial_tree:radix=4):outer=ring``.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, NamedTuple

from treeattn.collectives import parameters
from treeattn.collectives.parameters import Parameter
from treeattn.collectives.schedule import TRANSFER_LIMIT, Schedule
from treeattn.collectives.schemes.all_gather_merge import all_gather_merge
from treeattn.collectives.schemes.all_gather_trees import all_gather_trees
from treeattn.collectives.schemes.binary_tree import binary_tree
from treeattn.collectives.schemes.bine import bine
from treeattn.collectives.schemes.census import census
from treeattn.collectives.schemes.chain import chain
from treeattn.collectives.schemes.circulant import circulant
from treeattn.collectives.schemes.double_binary_tree import double_binary_tree
from treeattn.collectives.schemes.elimination import elimination
from treeattn.collectives.schemes.head_scatter import head_scatter
from treeattn.collectives.schemes.hierarchical import hierarchical
from treeattn.collectives.schemes.k_ary_tree import k_ary_tree
from treeattn.collectives.schemes.k_nomial_tree import k_nomial_tree
from treeattn.collectives.schemes.logp_optimal import logp_optimal
from treeattn.collectives.schemes.multi_leader import multi_leader
from treeattn.collectives.schemes.recursive_doubling import recursive_doubling
from treeattn.collectives.schemes.recursive_multiplying import recursive_multiplying
from treeattn.collectives.schemes.reduce_scatter_gather import reduce_scatter_gather
from treeattn.collectives.schemes.ring import ring
from treeattn.collectives.schemes.split_rail import split_rail
from treeattn.collectives.schemes.uneven_nodes import uneven_nodes
from treeattn.errors import RestrictionError, ScheduleError

__all__ = [
    "CATALOG",
    "DEVICES",
    "Scheme",
    "Selection",
    "build",
    "find",
    "names",
    "needs_nodes",
    "parse",
    "select",
]

#: How records travel -> where they lie.
DEVICES = {"mpi": "cpu", "nccl": "cuda", "peer": "cuda", "cuda-mpi": "cuda", "host": "cuda"}


@dataclass(frozen=True, slots=True)
class Scheme:
    """One row of the catalogue.

    cost: time of a reduction of n bytes over p ranks; alpha is the latency of a message, beta the time
    per byte. rooted: gathers at rank 0, then copies back down, so it can be the inner scheme of another.
    scattered: leaves rank r of p only the r-th of p slices of the result.
    A row of kind ``"library"`` has no generator: the library decides what it does, `description` says what
    is known; rows of kind ``"baseline"`` stand in a list of their own, `treeattn.baselines`. Both name the
    `module` that plans them: its ``plan`` takes a `reducer.Reduction` and the parameters. compiled: it calls
    the operator's compiled form. fused: attends while it communicates, so it has no reduction of its own; its
    ``plan`` takes more (`treeattn.baselines`).
    transports: how its records can travel; none for a schedule that is there to be built, checked and drawn
    alone. elsewhere: what to take on another device, or instead.
    """

    name: str
    generator: Callable[..., Schedule] | None
    cost: str
    parameters: tuple[Parameter, ...] = ()
    restriction: str = "none"
    rooted: bool = False
    scattered: bool = False
    fused: bool = False
    kind: Literal["schedule", "library", "baseline"] = "schedule"
    description: str = ""
    module: str = ""
    compiled: bool = False
    transports: tuple[str, ...] = tuple(DEVICES)
    elsewhere: str = ""

    @property
    def devices(self) -> tuple[str, ...]:
        """Where it runs."""
        return tuple(dict.fromkeys(DEVICES[transport] for transport in self.transports))

    @property
    def planner(self) -> Any:
        """The module that plans it, imported now: naming schemes needs no MPI library."""
        return importlib.import_module(self.module)

    @property
    def summary(self) -> str:
        """One line: what the scheme is."""
        if self.generator is None:
            return self.description
        return (self.generator.__doc__ or "").strip().partition("\n")[0]

    def parameter(self, name: str) -> Parameter | None:
        """The parameter of that name, or None."""
        return next((parameter for parameter in self.parameters if parameter.name == name), None)


class Selection(NamedTuple):
    """A scheme that was asked for, read once: its row, the parameters that were given, its one spelling.

    own: a schedule that was asked for by itself, in place of a name.
    """

    row: Scheme
    given: tuple[tuple[str, Any], ...]
    text: str
    own: Schedule | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """All parameters, defaults among them."""
        return {p.name: p.default for p in self.row.parameters} | dict(self.given)

    @property
    def needs_nodes(self) -> bool:
        """Whether it is shaped by node groups that were not given."""
        return self.row.parameter("nodes") is not None and "nodes" not in dict(self.given)

    @property
    def digest(self) -> str | None:
        """Of a schedule of one's own, equal for equal ones; None for a name."""
        return None if self.own is None else hashlib.sha256(self.own.to_json().encode()).hexdigest()[:16]

    def build(self, size: int, nodes: Any = None) -> Schedule:
        """Its schedule over `size` ranks; `nodes` where it `needs_nodes`. Raises as `build` below."""
        if self.own is not None:
            return self.own
        given = dict(self.given)
        if nodes is not None:
            given["nodes"] = _read(self.row, "nodes", nodes)
        return _build(self.row, given, size)


_RADIX = Parameter("radix", "integer", 2, "branches of the tree", low=2)
_NODES = Parameter("nodes", "nodes", None, "ranks that share a node; without it one node holds all ranks")
_RAIL = Parameter("rail", "scheme", "recursive_doubling", "scheme along each rail")
_SQUARE = f"refused above {TRANSFER_LIMIT} transfers: at most {{}} ranks"
_RAIL_LIMIT = "rail must leave its result on every rank; " + _SQUARE.format("about 512") + " per node"

CATALOG: dict[str, Scheme] = {
    row.name: row
    for row in (
        Scheme("chain", chain, "2 (p-1) (alpha + n beta)", rooted=True),
        Scheme("binary_tree", binary_tree, "about 4 log2(p) (alpha + n beta)", rooted=True),
        Scheme("k_ary_tree", k_ary_tree, "about 2 k log_k(p) (alpha + n beta)", (_RADIX,), rooted=True),
        Scheme(
            "k_nomial_tree", k_nomial_tree, "2 ceil(log_k p) (alpha + (k-1) n beta)", (_RADIX,), rooted=True
        ),
        Scheme(
            "double_binary_tree",
            double_binary_tree,
            "about 4 (log2(p) + c) (alpha + n beta / (2 c)) with c chunks per tree",
            (Parameter("chunks", "integer", 1, "pieces that each tree's half is pipelined in"),),
            restriction=f"refused above {TRANSFER_LIMIT} transfers: 4 chunks (p-1)",
        ),
        Scheme(
            "logp_optimal",
            logp_optimal,
            "2 T(p), the least t with f(t) = p: f(t) = 1 while t < L + 2 o, then f(t - g) + f(t - L - 2 o)",
            (
                Parameter("latency", "integer", 1600, "time a message is under way", low=0),
                Parameter("overhead", "integer", 200, "time it takes sender and receiver", low=0),
                Parameter("gap", "integer", 500, "time between the starts of a rank's messages"),
            ),
            rooted=True,
        ),
        Scheme(
            "recursive_doubling",
            recursive_doubling,
            "log2(p) (alpha + n beta), and 2 (alpha + n beta) more if p is not a power of two",
        ),
        Scheme(
            "recursive_multiplying",
            recursive_multiplying,
            "sum over factors k of (alpha + (k-1) n beta), and 2 (alpha + n beta) more if ranks fold",
            (Parameter("factors", "integers", None, "group size of each round, near first", low=2),),
            restriction="the product of the factors is at most the number of ranks",
        ),
        Scheme("ring", ring, "2 (p-1) (alpha + n beta / p)", restriction=_SQUARE.format(512)),
        Scheme(
            "reduce_scatter_gather",
            reduce_scatter_gather,
            "2 log2(p) alpha + 2 n (p-1)/p beta, and 2 (alpha + n beta) more if p is not a power of two",
            (Parameter("order", "choice", "far", "distance of the first partner", choices=("far", "near")),),
        ),
        Scheme(
            "bine",
            bine,
            "log2(p) (alpha + n beta), or 2 log2(p) alpha + 2 n (p-1)/p beta; + 2 (alpha + n beta) for folds",
            (
                Parameter(
                    "form",
                    "choice",
                    "latency",
                    "whole records, or halves and back",
                    choices=("latency", "bandwidth"),
                ),
            ),
        ),
        Scheme("circulant", circulant, "2 ceil(log2 p) alpha + 2 n (p-1)/p beta"),
        Scheme("elimination", elimination, "2 floor(log2 p) alpha + 2 n beta to 3 n beta"),
        Scheme(
            "all_gather_trees",
            all_gather_trees,
            "2 ceil(log2 p) alpha + 2 n (p-1)/p beta",
            restriction=_SQUARE.format(512) + " if p is odd, more if 2, 4, .. divide it",
        ),
        Scheme(
            "hierarchical",
            hierarchical,
            "inner tree up and down within a node + outer over the leaders",
            (
                Parameter("inner", "tree", "binary_tree", "rooted scheme within each node"),
                Parameter("outer", "scheme", "recursive_doubling", "scheme across the leaders"),
                _NODES,
            ),
            restriction="outer must leave its result on every rank",
        ),
        Scheme(
            "split_rail",
            split_rail,
            "2 (alpha + n beta) within a node of g ranks + the rail scheme over the nodes on n/g bytes",
            (_RAIL, _NODES),
            restriction=_RAIL_LIMIT,
        ),
        Scheme(
            "multi_leader",
            multi_leader,
            "2 (alpha + (g-1) n/l beta) within a node of g ranks + the rail scheme on n/l bytes",
            (
                Parameter("leaders", "integer", 2, "parts of the records, each with a leader in every node"),
                _RAIL,
                _NODES,
            ),
            restriction=_RAIL_LIMIT,
        ),
        Scheme(
            "uneven_nodes",
            uneven_nodes,
            "2 (alpha + (g-1)/g n beta) within a node of g ranks + the rail scheme on n/g bytes",
            (_RAIL, _NODES),
            restriction=_RAIL_LIMIT,
        ),
        Scheme("head_scatter", head_scatter, "ceil(log2 p) alpha + n (p-1)/p beta", scattered=True),
        Scheme("all_gather_merge", all_gather_merge, "alpha + (p-1) n beta", restriction=_SQUARE.format(724)),
        Scheme(
            "census",
            census,
            "ceil(log2 p) (alpha + n beta)",
            restriction="not run: ranks end with unlike bits",
            transports=(),
            elsewhere="its ranks end with unlike bits: build, check and draw it, but run recursive_doubling",
        ),
        Scheme(
            "mpi_allreduce",
            None,
            "the library's",
            kind="library",
            description="whatever the library chooses for this size and machine",
            module="treeattn.collectives.libraries.mpi_allreduce",
            compiled=True,
            transports=("mpi", "host"),
        ),
        Scheme(
            "nccl_allreduce",
            None,
            "the library's, of n/(d+2) bytes and then of n",
            (
                Parameter(
                    "calls", "choice", "2", "all-reduces in a step; 3 as in the paper", choices=("2", "3")
                ),
            ),
            restriction="device='cuda' only",
            kind="library",
            description="NCCL's all-reduce of maxima, then of rescaled records: GPUs only; sums, not merges",
            module="treeattn.collectives.libraries.nccl_allreduce",
            transports=("nccl",),
            elsewhere="on the CPU take mpi_allreduce",
        ),
    )
}


def names(kind: Literal["schedule", "library"] | None = None) -> list[str]:
    """All names of what can run, or those of one kind, in the order of the catalogue."""
    return [row.name for row in CATALOG.values() if row.transports and kind in (None, row.kind)]


def find(name: str, catalog: Mapping[str, Scheme] = CATALOG) -> Scheme:
    """The row of a bare name. Raises `ScheduleError` that lists the names."""
    if name in catalog:
        return catalog[name]
    raise ScheduleError(f"there is no scheme {name!r}; {_meant(name, list(catalog))}")


def parse(text: str, catalog: Mapping[str, Scheme] = CATALOG) -> tuple[str, dict[str, Any]]:
    """``"k_nomial_tree:radix=4"`` -> ``("k_nomial_tree", {"radix": 4})``: only what the text gives.

    Inner schemes come out in their one spelling. The name is looked for in `catalog`. Raises `ScheduleError`
    for an unknown name or parameter, a bad value, or parentheses that do not match; the message names the
    remedy.
    """
    if not isinstance(text, str):
        raise ScheduleError(f"{text!r} is not the name of a scheme; {_meant('', list(catalog))}")
    name, *assignments = parameters.split(text)
    row = find(name.strip(), catalog)
    given: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ScheduleError(f"{text!r}: {assignment!r} is not of the form key=value")
        if key.strip() in given:
            raise ScheduleError(f"{text!r} gives {key.strip()} twice")
        given[key.strip()] = _read(row, key.strip(), value)
    return row.name, given


def select(scheme: str | Schedule, catalog: Mapping[str, Scheme] = CATALOG) -> Selection:
    """What `scheme` asks for: a scheme string, or a schedule of one's own. Raises as `parse` does."""
    if isinstance(scheme, Schedule):
        scheme.check_types()
        row = Scheme(scheme.name, None, "one's own", scattered=scheme.result == "scattered")
        return Selection(row, (), scheme.name, scheme)
    name, given = parse(scheme, catalog)
    return Selection(catalog[name], tuple(given.items()), _spell(catalog[name], given))


def needs_nodes(text: str) -> bool:
    """Whether the scheme is shaped by node groups that `text` does not give."""
    return select(text).needs_nodes


def build(scheme: str, size: int, **params: Any) -> Schedule:
    """The schedule of `scheme` (a name or scheme string) over `size` ranks.

    Parameters come from the text or as keywords: ``build("k_nomial_tree", 16, radix=4)``. `nodes` may be
    a sequence of node sizes or of the ranks of each node; None stands for the default. Raises
    `ScheduleError` for what cannot be read and for library reducers, `RestrictionError` for what the
    scheme does not serve.
    """
    name, given = parse(scheme)
    row = find(name)
    for key, value in params.items():
        if value is None:
            continue
        if key in given:
            raise ScheduleError(f"{key} is given twice: in {scheme!r} and as an argument")
        given[key] = _read(row, key, value)
    return _build(row, given, size)


def _build(row: Scheme, given: Mapping[str, Any], size: int) -> Schedule:
    name = row.name
    if row.generator is None:
        raise ScheduleError(
            f"{name} is a reducer of a library and has no schedule; schedules: {', '.join(names('schedule'))}"
        )
    if isinstance(size, int) and size > parameters.RANK_LIMIT:
        raise RestrictionError(f"{name}: {size} ranks are more than the {parameters.RANK_LIMIT} of a plan")
    if not isinstance(size, int) or size < 1:
        raise ScheduleError(
            f"{name}: size={size!r} is not a number of ranks: it must be an integer from 1 up"
        )
    arguments = {p.name: _argument(row, p, given.get(p.name, p.default), size) for p in row.parameters}
    return replace(row.generator(size, **arguments), name=_spell(row, given))


def _read(row: Scheme, key: str, value: Any) -> Any:
    parameter = row.parameter(key)
    if parameter is None:
        raise ScheduleError(f"{row.name} has no parameter {key!r}; {_unknown_parameter(row, key)}")
    read = parameters.read(row.name, parameter, value)
    if parameter.kind not in ("scheme", "tree"):
        return read
    inner_name, inner_given = parse(read)
    inner = find(inner_name)
    if parameter.kind == "tree" and not inner.rooted:
        rooted = ", ".join(other.name for other in CATALOG.values() if other.rooted)
        raise ScheduleError(f"{row.name}: {key}={inner.name} gathers at no root; take one of {rooted}")
    if not inner.transports:
        raise ScheduleError(f"{row.name}: {key}={inner.name}: {inner.elsewhere}")
    if inner.kind != "schedule":
        raise ScheduleError(f"{row.name}: {key}={inner.name} is a reducer of a library and has no schedule")
    return _spell(inner, inner_given)


def _argument(row: Scheme, parameter: Parameter, value: Any, size: int) -> Any:
    """What the generator is called with: schemes become functions of a size, nodes become ranks."""
    if parameter.kind in ("scheme", "tree"):
        return partial(build, value)
    if parameter.kind == "nodes":
        return parameters.groups(row.name, value, size)
    return value


def _spell(row: Scheme, given: Mapping[str, Any]) -> str:
    text = row.name
    for parameter in row.parameters:
        value = given.get(parameter.name, parameter.default)
        written = None if value == parameter.default else parameters.write(parameter, value)
        if written is not None:
            text += f":{parameter.name}={written}"
    return text


def _unknown_parameter(row: Scheme, key: str) -> str:
    if any(parameter.kind in ("scheme", "tree") for parameter in row.parameters):
        hint = ", and parameters of an inner scheme go in parentheses: inner=(k_ary_tree:radix=4)"
    else:
        hint = ""
    return _meant(key, [parameter.name for parameter in row.parameters]) + hint


def _meant(word: str, known: list[str]) -> str:
    close = get_close_matches(word, known, n=1)
    guess = f"did you mean {close[0]}? " if close else ""
    return guess + (f"known: {', '.join(known)}" if known else "it takes none")
