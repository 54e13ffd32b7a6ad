"""From what every rank asks for to what a step runs: agreed once, planned once.

A scheme is a schedule, which an executor runs; a library's own reduction; or a baseline, which may also
attend while it communicates. Its row says which, and what it can do; nothing here knows the name of one.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from treeattn import bins
from treeattn.attention.mask import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.backends.device import Attention, Device, WholeStep
from treeattn.collectives.catalog import Selection
from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.collectives.runtime.operator import Operator
from treeattn.collectives.runtime.reducer import Reducer, ReductionSpec
from treeattn.collectives.schedule import Result, Schedule
from treeattn.decoder import pipeline, reducers
from treeattn.decoder.mask_plan import DeclaredPositions, MaskPlan, check_blocks
from treeattn.decoder.request import Reduction, Request, of_reduction, refuse
from treeattn.mpi import communicators
from treeattn.mpi.agreement import collectively
from treeattn.partial import Array
from treeattn.selection import named, select


def selected(how: Reduction, comm: Communicator, device: str) -> Selection:
    """What `how` asks of the ranks of `comm`, or what they take where it names no scheme: see `Reduction`.

    Over the memory of one node the fewest rounds are the fastest; between GPUs, where a launch costs more
    than a message, all of them in one; between nodes, a message for each node. Raises `ScheduleError`.
    """
    if how.scheme is not None:
        return select(how.scheme)
    if len(comm.nodes) > 1:
        return named("hierarchical")
    return named("all_gather_merge" if device == "cuda" else "recursive_doubling")


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
    refuse(of_reduction(how, selection) | {"folds": because, "folds everywhere": not to_root})
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
        """Before the reduction."""
        if self._reordered:
            self._memory.copy(self.wire, self.records.transpose(1, 0, 2, 3))

    def from_wire(self) -> None:
        """After it."""
        if self.sliced:
            head_major = self.wire if self._reordered else self.wire.transpose(1, 0, 2, 3)
            self._memory.copy(self.own, head_major[self.heads].transpose(1, 0, 2, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a step is made of, decided once; ``print`` says every stage, buffer and message, and why.

    attend: called with q, k, v and lengths (and a block table), writes the records of this rank; reads
    `tables` where there are some. reducer: folds those of all ranks, between `buffers.to_wire` and
    `from_wire`. finish: divides. reduce_and_finish: both in one launch; None where there is none. fused_step:
    all stages in one call; None likewise. replan_for_mask: plans `attend` and `fused_step` anew for other
    tables; None where the reducer attends.
    """

    comm: Communicator
    request: Request
    buffers: Buffers
    schedule: Schedule | None
    transport: str
    mask: MaskPlan
    tables: MaskTables | None
    attend: Attention
    reducer: Reducer
    finish: Callable[[], object]
    reduce_and_finish: Callable[[], object] | None
    fused_step: WholeStep | None
    replan_for_mask: Callable[[MaskTables], tuple[Attention, WholeStep | None]] | None

    def __str__(self) -> str:
        from treeattn.decoder.plan_text import described  # nobody asks in a step

        return described(self)


class LocalPlan:
    """The part of a plan that a rank makes by itself: what it has no memory or kernel for is known before any
    other rank waits. `complete` is the rest, of all ranks."""

    def __init__(self, comm: Communicator, request: Request) -> None:
        """Raises what one rank alone can tell to be wrong."""
        request.check()
        watchdog.limit()
        self.comm, self.request = comm, request
        device, shape = request.device, request.shape
        device.check_shape(shape)
        self._operator = device.merge_operator(shape.v_dim, shape.record_dtype)
        self._buffers = Buffers(request, comm, self._operator)
        self._mask = MaskPlan(request.rules, shape)
        self._tables = self._mask.tables() if request.rules.by_tables else None
        self._attention = None if request.attends_by_reducer else self._attention_by(self._tables)
        self._finish = device.finish(self._buffers.own, self._buffers.out, self._buffers.lse)

    def _attention_by(self, tables: MaskTables | None) -> Attention:
        request = self.request
        return request.device.attention(request.shape, self._buffers.records, request.logit_scale, tables)

    @property
    def share(self) -> tuple[str | None, DeclaredPositions]:
        """What the others are told: why this rank is slow, if it is, and where its tokens stand."""
        return self.request.device.slow_because(), self.request.declared

    def complete(self, gathered: list[Any]) -> Plan:
        """Collective. gathered: what the ranks `share`."""
        comm, request, buffers, mask = self.comm, self.request, self._buffers, self._mask
        if comm.rank == 0:
            _warn_without_compiler([slow for slow, _ in gathered])
        if request.asks_positions:
            mask.agree([declared for _, declared in gathered], comm.rank)
        if request.reproducible == "blocks":
            collectively(comm, lambda: check_blocks(mask.runs, comm.size))
        memory = request.device.memory
        spec = ReductionSpec(comm, self._operator, buffers.wire, buffers.group, memory)
        rounds, transport, reducer = self.reduction(spec)
        add_sinks = None
        if comm.rank == 0:
            add_sinks = sinks(request.rules, request.device, buffers.records, self._operator)

        def stages(attention: Attention) -> tuple[Attention, WholeStep | None]:
            """With sinks, which come before the reduction; and a step in one call, where that can be."""
            if add_sinks is not None:
                return _SinksAdded(attention, add_sinks), None
            if buffers.sliced:
                return attention, None
            results = buffers.records, buffers.out, buffers.lse
            return attention, request.device.whole_step(attention, reducer, *results)

        attend, fused_step = stages(self._attention or reducer.take)
        return Plan(
            comm=comm,
            request=request,
            buffers=buffers,
            schedule=rounds,
            transport=transport,
            mask=mask,
            tables=self._tables,
            attend=attend,
            reducer=reducer,
            finish=self._finish,
            reduce_and_finish=None if buffers.sliced else reducer.fuse_epilogue(self._finish),
            fused_step=fused_step,
            replan_for_mask=self._attention and (lambda tables: stages(self._attention_by(tables))),
        )

    def reduction(self, spec: ReductionSpec) -> tuple[Schedule | None, str, Any]:
        """The schedule, over which transport, and what reduces the records: a library or a baseline, an
        executor of a schedule, or groups of these. Collective."""
        request, buffers = self.request, self._buffers
        row, how, comm = request.scheme.row, request.how, spec.comm
        chosen = reducers.choose(request.device.name, how.transport, row, comm.size, comm.library)
        rounds = schedule(request.scheme, comm, how.output)

        def reduce(records: Array) -> Reducer:
            return reducers.plan(chosen, request.scheme, rounds, spec._replace(buffer=records), how.executor)

        if row.fused:
            reducers.refuse(how.executor, f"{row.name} attends while it communicates")
            step = request.shape, request.logit_scale, buffers.records
            return rounds, chosen, row.plan(spec, *step, **request.scheme.parameters)
        if how.groups == 1:
            return rounds, chosen, reduce(buffers.wire)
        given = request.shape, request.logit_scale, buffers.records, request.device
        groups = pipeline.split(how.groups, *given, reduce)
        return rounds, chosen, pipeline.Pipeline(groups, request.device.memory)


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
