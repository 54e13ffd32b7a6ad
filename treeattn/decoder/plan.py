"""From what every rank asks for to what a step runs: agreed once, planned once."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treeattn import bins
from treeattn.attention.arguments import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs, as_runs
from treeattn.backends.device import Attention, Device, WholeStep
from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.collectives.runtime.operator import Operator
from treeattn.collectives.runtime.reducer import Reducer, ReductionSpec
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import pipeline, reducers
from treeattn.decoder.mask_plan import DeclaredPositions, check_blocks, planned_positions
from treeattn.decoder.request import Request
from treeattn.mpi.communicators import Agreement, collectively
from treeattn.partial import Array


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
        """Reorder the records for the reduction, where it cuts them by heads."""
        if self._reordered:
            self._memory.copy(self.wire, self.records.transpose(1, 0, 2, 3))

    def from_wire(self) -> None:
        """Take this rank's heads out of what was reduced."""
        if self.sliced:
            head_major = self.wire if self._reordered else self.wire.transpose(1, 0, 2, 3)
            self._memory.copy(self.own, head_major[self.heads].transpose(1, 0, 2, 3))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a step is made of, decided once; ``print`` says every stage, buffer and message, and why.

    The stages, in order: `attend`, called with q, k, v and lengths (and a block table), writes the records of
    this rank, and reads `tables` where there are some; `add_sinks`, on one rank, if any; `buffers.to_wire`;
    `reducer` folds the records of all ranks; `buffers.from_wire`; `finish` divides.

    runs, q_positions: where this rank's tokens and the queries stand unless a step says it, if that is known.
    """

    comm: Communicator
    request: Request
    buffers: Buffers
    schedule: Schedule | None
    transport: str
    runs: Runs | None
    q_positions: Array | None
    tables: MaskTables | None
    attend: Attention
    add_sinks: Callable[[], object] | None
    reducer: Reducer
    finish: Callable[[], object]

    def __str__(self) -> str:
        from treeattn.decoder.plan_text import described  # nobody asks in a step

        return described(self)

    @functools.cached_property
    def fused_step(self) -> WholeStep | None:
        """All stages in one call; None where there is none, or something comes between them."""
        if self.add_sinks is not None or self.buffers.sliced or self.request.attends_by_reducer:
            return None
        results = self.buffers.records, self.buffers.out, self.buffers.lse
        parts = self.attend, self.reducer, self.finish
        return self.request.device.whole_step(self.request.shape, *parts, *results)

    def with_tables(self) -> Plan:
        """The same but for attention, which reads tables of its own. Not where the reducer attends, which
        lets every query see everything."""
        tables = _tables(self.request)
        return replace(self, tables=tables, attend=_attention(self.request, self.buffers, tables))

    def fill_tables(
        self, tokens: int, lengths: Any, positions: Any = None, q_positions: Any = None, **seen: Any
    ) -> None:
        """Fill its tables for a step over arrays of `tokens` tokens, as `MaskTables.update` does; lengths of
        the device, too. Raises `ArgumentError`."""
        assert self.tables is not None
        runs = self.runs if positions is None else as_runs(positions)
        stands = self.q_positions if q_positions is None else q_positions
        self.tables.update(runs, tokens, self.request.device.host_lengths(lengths), stands, **seen)


def _tables(request: Request) -> MaskTables:
    return MaskTables(request.rules, request.shape.batch, request.shape.queries)


def _attention(request: Request, buffers: Buffers, tables: MaskTables | None) -> Attention:
    return request.device.attention(request.shape, buffers.records, request.logit_scale, tables)


class LocalPlan:
    """The part of a plan that a rank makes by itself: what it has no memory or kernel for is known before any
    other rank waits. `complete` is the rest, of all ranks."""

    def __init__(self, agreed: Agreement, request: Request) -> None:
        """agreed: tells the other ranks of it. Raises what one rank alone can tell to be wrong."""
        request.check()
        watchdog.limit()
        self._agreed, self.comm, self.request = agreed, agreed.comm, request
        device, shape = request.device, request.shape
        self.check_shape()
        self._operator = device.merge_operator(shape.v_dim, shape.record_dtype)
        self._buffers = buffers = Buffers(request, self.comm, self._operator)
        self._tables = _tables(request) if request.rules.by_tables else None
        self._attend = None if request.attends_by_reducer else self.attention()
        self._finish = device.finish(buffers.own, buffers.out, buffers.lse)
        agreed.must_match, agreed.share = request.settings, (device.slow_because(), request.declared)

    def check_shape(self) -> None:
        """Raise what the device has against the shape."""
        self.request.device.check_shape(self.request.shape)

    def attention(self) -> Attention:
        """What writes this rank's records."""
        return _attention(self.request, self._buffers, self._tables)

    def complete(self) -> Plan:
        """The plan, once all ranks have agreed. Collective."""
        comm, request, buffers = self.comm, self.request, self._buffers
        runs, q_positions = None, None
        gathered: list[tuple[str | None, DeclaredPositions]] = self._agreed.gathered
        if comm.rank == 0:
            _warn_without_compiler([slow for slow, _ in gathered])
        if request.asks_positions:
            everyone = [declared for _, declared in gathered]
            runs, q_positions = planned_positions(everyone, comm.rank, request.shape.queries)
        if request.reproducible == "blocks":
            collectively(comm, lambda: check_blocks(runs, comm.size))
        spec = ReductionSpec(comm, self._operator, buffers.wire, buffers.group, request.device.memory)
        rounds, transport, reducer = self.reduction(spec)
        add_sinks = None
        if comm.rank == 0:
            add_sinks = sinks(request.rules, request.device, buffers.records, self._operator)
        return Plan(
            comm=comm,
            request=request,
            buffers=buffers,
            schedule=rounds,
            transport=transport,
            runs=runs,
            q_positions=q_positions,
            tables=self._tables,
            attend=self._attend or reducer.take,
            add_sinks=add_sinks,
            reducer=reducer,
            finish=self._finish,
        )

    def reduction(self, spec: ReductionSpec) -> tuple[Schedule | None, str, Any]:
        """The schedule, over which transport, and what reduces the records: a library or a baseline, an
        executor of a schedule, or groups of these. Collective."""
        request, buffers = self.request, self._buffers
        scheme, how, comm, device = request.scheme, request.how, spec.comm, request.device
        chosen = reducers.choose(comm, device, how, scheme.row)
        rounds = reducers.schedule(scheme, comm, how.output)
        attended = request.shape, request.logit_scale, buffers.records

        def reduce(records: Array) -> Reducer:
            return reducers.plan(chosen, scheme, rounds, spec._replace(buffer=records), how.executor)

        if scheme.row.fused:
            reducers.refuse(how.executor, f"{scheme.row.name} attends while it communicates")
            return rounds, chosen, scheme.row.plan(spec, *attended, **scheme.parameters)
        if how.groups == 1:
            return rounds, chosen, reduce(buffers.wire)
        groups = pipeline.split(how.groups, *attended, device, reduce)
        return rounds, chosen, pipeline.Pipeline(groups, request.shape, device.memory)


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
