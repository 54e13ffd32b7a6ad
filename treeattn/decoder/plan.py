"""From what every rank asks for to what a step runs: agreed once, planned once.

A scheme is a schedule, which an executor runs; a library's own reduction; or a baseline, which may also
attend while it communicates. Its row says which, and what it can do; nothing here knows the name of one.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from treeattn import bins
from treeattn.attention.mask import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.backends.device import Attention, Device, WholeStep
from treeattn.collectives import catalog
from treeattn.collectives.catalog import Selection
from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.collectives.runtime.operator import Operator
from treeattn.collectives.runtime.reducer import Reducer, ReductionSpec
from treeattn.collectives.schedule import Result, Schedule
from treeattn.decoder import pipeline, reducers
from treeattn.decoder.reproducible import check_blocks
from treeattn.decoder.request import Reduction, Request, check
from treeattn.decoder.sight import Sight, agree
from treeattn.errors import RestrictionError
from treeattn.mpi import communicators
from treeattn.mpi.agreement import Agreement, collectively
from treeattn.partial import Array
from treeattn.selection import CATALOG, select


def selected(how: Reduction, comm: Communicator, device: str) -> Selection:
    """What `how` asks of the ranks of `comm`, or what they take where it names no scheme: see `Reduction`.

    Over the memory of one node the fewest rounds are the fastest; between GPUs, where a launch costs more
    than a message, all of them in one; between nodes, a message for each node. Raises `ScheduleError`.
    """
    if how.scheme is not None:
        return select(how.scheme)
    if len(comm.nodes) > 1:
        return select("hierarchical")
    return select("all_gather_merge" if device == "cuda" else "recursive_doubling")


def folding(
    scheme: str | Schedule | Reduction | None,
    because: str,
    comm: Communicator,
    device: str,
    *,
    to_root: bool = False,
) -> tuple[Reduction, Selection]:
    """What ``scheme=`` asks for where finished records are to be folded on every rank, or with `to_root` on
    rank 0.

    because: what an error says of why. Raises `ArgumentError`, `ScheduleError`, `RestrictionError`.
    """
    how = Reduction.of(scheme)
    selection = selected(how, comm, device)
    plain = Reduction()
    for name in ("output", "groups"):
        to_rank_0 = to_root and name == "output" and how.output == "root"
        if getattr(how, name) != getattr(plain, name) and not to_rank_0:
            raise RestrictionError(f"{name}={getattr(how, name)!r} is for treeattn.Decoder, and {because}")
    if selection.row.scattered or selection.row.fused:
        does = "attends while it communicates" if selection.row.fused else "leaves each rank a slice of heads"
        raise RestrictionError(
            f"{selection.text} {does}, and {because}: take another scheme, such as hierarchical"
        )
    _check_output(selection.row, how.output)
    return how, selection


class Buffers:
    """Records as the kernel writes them, as the reducer cuts them, and this rank's part of the result.

    A scattered schedule cuts the records by heads, so they must be head-major on the wire: for one
    sequence they are; for several, a step reorders into a second buffer. `given`: whether this rank has a
    result; one that has none of ``output="root"`` divides what it holds, and nobody looks at it.
    """

    def __init__(self, request: Request, comm: Communicator, operator: Operator) -> None:
        shape, self._memory = request.shape, request.device.memory
        batch, all_heads, queries = shape.lse_shape
        dtype, empty = shape.record_dtype, self._memory.empty
        self.given = request.how.output != "root" or comm.rank == 0
        self.heads = _own_heads(all_heads, request.how.output, comm)
        own = self.heads.stop - self.heads.start
        whole = own == all_heads
        self.group = batch * queries
        self.records = empty((batch, all_heads, queries, operator.width), operator.dtype)
        self.sliced = not whole
        self._reordered = batch > 1 and not whole
        self.wire = self.records
        if self._reordered:
            self.wire = empty((all_heads, batch, queries, operator.width), operator.dtype)
        self.own = self.records
        if not whole:
            self.own = empty((batch, own, queries, operator.width), operator.dtype)
        self.out = empty((batch, queries, own, shape.v_dim), dtype)
        self.lse = empty((batch, own, queries), dtype)

    def to_wire(self) -> None:
        """Before the reduction, if the result is `sliced`."""
        if self._reordered:
            self._memory.copy(self.wire, self.records.transpose(1, 0, 2, 3))

    def from_wire(self) -> None:
        head_major = self.wire if self._reordered else self.wire.transpose(1, 0, 2, 3)
        self._memory.copy(self.own, head_major[self.heads].transpose(1, 0, 2, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a step is made of, decided once; ``print`` says every stage, buffer and message, and why.

    attend: called with q, k, v and lengths (and a block table), writes the records of this rank; reads
    `tables` where there are some. reducer: folds the records of all ranks. reduce: a whole step of it, with
    what reorders the records before and after; start, wait: its halves. finish: divides. complete: reduce and
    finish, one launch where there is one. whole: all stages in one call; None where there is none. see: plans
    `attend` and `whole` anew for other tables; None where the reducer attends.
    """

    comm: Communicator
    request: Request
    buffers: Buffers
    schedule: Schedule | None
    transport: str
    attend: Attention
    reducer: Reducer
    reduce: Callable[[], object]
    start: Callable[[], object]
    wait: Callable[[], object]
    finish: Callable[[], object]
    complete: Callable[[], object]
    whole: WholeStep | None
    sight: Sight
    tables: MaskTables | None
    see: Callable[[MaskTables], tuple[Attention, WholeStep | None]] | None

    def __str__(self) -> str:
        from treeattn.decoder.plan_text import described  # nobody asks in a step

        return described(self)


class _Routed(NamedTuple):
    """How the records are reduced: the schedule, over which transport, and by what."""

    schedule: Schedule | None
    transport: str
    reducer: Any


#: Plans what reduces the records of a spec. Collective.
Route = Callable[[ReductionSpec], tuple[Schedule | None, Reducer]]


def plan(comm: Communicator, ask: Callable[[], Request], route: Route | None = None) -> Plan:
    """Collective. Whatever goes wrong in `ask` and on this rank alone is raised by every rank.

    route: plans the reduction in place of what the request's scheme names. Raises `ArgumentError` where ranks
    ask for different things, and what planning raises.
    """
    with Agreement(comm) as agreed:
        request = ask()
        device, shape = request.device, request.shape
        check(request)
        agreed.must_match = request.settings
        watchdog.limit()
        device.check_shape(shape)
        agreed.share = device.slow_because(), request.stated.told() if request.asks_positions else None
        operator = device.merge_operator(shape.v_dim, shape.record_dtype)
        buffers = Buffers(request, comm, operator)
        attention, sight = None, Sight(request.rules, shape)
        tables = sight.tables() if request.rules.by_tables else None
        if not request.attends_by_reducer:
            attention = device.attention(shape, buffers.records, request.logit_scale, tables)
        finish = device.finish(buffers.own, buffers.out, buffers.lse)
    if comm.rank == 0:
        _warn_without_compiler([slow for slow, _ in agreed.gathered])
    if request.asks_positions:
        sight.runs, ends = agree(request.stated.layout, [told for _, told in agreed.gathered], comm.rank)
        sight.stand(ends)
    if request.reproducible == "blocks":
        collectively(comm, lambda: check_blocks(sight.runs, comm.size))
    reduction = ReductionSpec(comm, operator, buffers.wire, buffers.group, device.memory)
    routed = _routed(request, buffers, reduction) if route is None else _Routed(*_given(route, reduction))
    reducer: Any = routed.reducer
    add_sinks = sinks(request.rules, device, buffers.records, operator) if comm.rank == 0 else None

    def stages(attention: Attention) -> tuple[Attention, WholeStep | None]:
        """With sinks, which come before the reduction; and all of a step in one call, where that can be."""
        if add_sinks is not None:
            return _SinksAdded(attention, add_sinks), None
        if buffers.sliced:
            return attention, None
        whole = device.whole_step(attention, reducer, buffers.records, buffers.out, buffers.lse)
        return attention, whole

    def see(new: MaskTables) -> tuple[Attention, WholeStep | None]:
        return stages(device.attention(shape, buffers.records, request.logit_scale, new))

    attend, whole = stages(reducer.take if attention is None else attention)
    before, after = (buffers.to_wire, buffers.from_wire) if buffers.sliced else (None, None)
    reduce = _in_turn(before, reducer, after)
    return Plan(
        comm=comm,
        request=request,
        buffers=buffers,
        schedule=routed.schedule,
        transport=routed.transport,
        attend=attend,
        reducer=reducer,
        reduce=reduce,
        start=_in_turn(before, reducer.start),
        wait=_in_turn(reducer.wait, after),
        finish=finish,
        complete=(None if buffers.sliced else reducer.fuse_epilogue(finish)) or _in_turn(reduce, finish),
        whole=whole,
        sight=sight,
        tables=tables,
        see=None if attention is None else see,
    )


def _in_turn(*parts: Callable[[], object] | None) -> Callable[[], object]:
    first, *others = (part for part in parts if part is not None)
    if not others:
        return first

    def run() -> None:
        first()
        for part in others:
            part()

    return run


@dataclass(frozen=True, slots=True)
class _SinksAdded:
    """Attention, and then the sinks."""

    attention: Any
    add: Callable[[], object]

    def __call__(self, *arrays: Any) -> None:
        self.attention(*arrays)
        self.add()

    def refresh(self) -> None:
        self.attention.refresh()


def _given(route: Route, reduction: ReductionSpec) -> tuple[Schedule | None, str, Reducer]:
    schedule, reducer = route(reduction)
    return schedule, "mpi", reducer


def _routed(request: Request, buffers: Buffers, reduction: ReductionSpec) -> _Routed:
    """What reduces the records: a library or a baseline, an executor of a schedule, or groups of these."""
    row, how, comm = request.scheme.row, request.how, reduction.comm
    _check_output(row, how.output)
    chosen = reducers.choose(request.device.name, how.transport, row, comm.size, comm.library)
    rounds = schedule(request.scheme, comm, how.output)
    reducer: Reducer
    if row.fused:
        reducers.refuse(how.executor, f"{row.name} attends while it communicates")
        step = request.shape, request.logit_scale, buffers.records
        reducer = row.plan(reduction, *step, **request.scheme.parameters)
    elif how.groups == 1:
        reducer = reducers.plan(chosen, request.scheme, rounds, reduction, how.executor)
    else:
        reducer = _pipelined(request, buffers, chosen, rounds, reduction)
    return _Routed(rounds, chosen, reducer)


def plan_reducer(
    comm: Communicator,
    device: Device,
    how: Reduction,
    scheme: Selection,
    operator: Operator,
    buffer: Array,
) -> Reducer:
    """The reducer of records that somebody else made: `buffer` [.., operator.width]. Collective.

    scheme: not one that is fused.
    """
    chosen = reducers.choose(device.name, how.transport, scheme.row, comm.size, comm.library)
    reduction = ReductionSpec(comm, operator, buffer, 1, device.memory)
    rounds = schedule(scheme, comm, how.output)
    return reducers.plan(chosen, scheme, rounds, reduction, how.executor)


def schedule(scheme: Selection, comm: Communicator, output: str = "replicated") -> Schedule | None:
    """The schedule of `scheme` for `comm`; node groups come from the machine where they are not given.
    output: as of a `Reduction`.

    None for a scheme that has none: a library's reduction, a baseline. Collective.
    """
    if scheme.row.module:
        return None
    return _built(scheme, comm.size, communicators.node_groups(comm), _result(output))


@functools.lru_cache(maxsize=32)
def _built(scheme: Selection, size: int, nodes: tuple[tuple[int, ...], ...], result: Result) -> Schedule:
    return scheme.build(size, nodes if scheme.needs_nodes else None, result)


def _result(output: str) -> Result:
    """What is asked of a schedule that leaves its result on every rank."""
    return "root" if output == "root" else "replicated"


def _own_heads(heads: int, output: str, comm: Communicator) -> slice:
    """The heads that this rank's result covers."""
    if output != "heads":
        return slice(0, heads)
    return slice(comm.rank * heads // comm.size, (comm.rank + 1) * heads // comm.size)


def _check_output(row: catalog.Scheme, output: str) -> None:
    """Raise `RestrictionError` unless the scheme leaves its result where `output` wants it."""
    if row.result == "scattered" and output != "heads":
        raise RestrictionError(
            f"{row.name} leaves each rank its slice of heads: from Python, with output='heads'"
        )
    if row.result == "root" and output != "root":
        raise RestrictionError(f"{row.name} leaves its result on rank 0: from Python, with output='root'")
    if row.module and output == "root":
        raise RestrictionError(
            f"{row.name} is no schedule, of which output='root' takes the part that leads to rank 0: take "
            "scheme='hierarchical', say"
        )
    if row.result != "scattered" and output == "heads":
        offer = " or ".join(f"scheme='{other.name}'" for other in CATALOG.values() if other.scattered)
        raise RestrictionError(f"{row.name} leaves every rank all heads; {offer} serves output='heads'")


def _pipelined(
    request: Request,
    buffers: Buffers,
    transport: str,
    rounds: Schedule | None,
    reduction: ReductionSpec,
) -> pipeline.Pipeline:
    """Attention and reduction by groups of heads. Collective."""

    def reduce(records: Array) -> Reducer:
        part = reduction._replace(buffer=records)
        return reducers.plan(transport, request.scheme, rounds, part, request.how.executor)

    given = request.shape, request.logit_scale, buffers.records, request.device
    return pipeline.Pipeline(pipeline.split(request.how.groups, *given, reduce), request.device.memory)


def sinks(rules: Rules, device: Device, records: Array, operator: Operator) -> Callable[[], object] | None:
    """Folds one more key of each head, with the value 0, into the records [batch, heads, queries, width]; it
    is for one rank alone, so that sinks count once whatever the number of ranks."""
    if rules.sink_logits is None:
        return None
    host = np.zeros(records.shape, records.dtype)
    logits = np.asarray(rules.sink_logits, np.float32 if host.dtype == np.int64 else records.dtype)
    if host.dtype == np.int64:
        v_dim = (host.shape[3] - bins.EXTRA) // 2
        host[...] = np.stack([bins.record_of_sink(logit, v_dim) for logit in logits])[:, None]
    else:
        host[..., 0] = logits[:, None]
        host[..., 1] = logits[:, None] > -np.inf
    width = records.shape[3]
    flat = records.reshape(-1, width), device.from_host(host).reshape(-1, width)
    merge: Callable[[], object] = operator.planned_merge(*flat)
    return merge


def _warn_without_compiler(problems: list[str | None]) -> None:
    """The merge has the same bits with and without the compiled kernels, so ranks may differ here.

    problems: of each rank. Rank 0 speaks for all.
    """
    lacking = [rank for rank, problem in enumerate(problems) if problem]
    if lacking:
        warnings.warn(
            f"{len(lacking)} of {len(problems)} ranks run on NumPy instead of the compiled CPU kernels, "
            f"several times slower: {problems[lacking[0]]}",
            RuntimeWarning,
            stacklevel=4,
        )
