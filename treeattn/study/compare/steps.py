"""What is measured, as decoders: any scheme, one with bfloat16 records, the library's sum, and nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from treeattn.attention.shape import Shape
from treeattn.backends import device as devices
from treeattn.backends.cpu import NullOperator
from treeattn.collectives.catalog import Selection
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.collectives.runtime.reducer import Reducer, ReductionSpec
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import Decoder, reducers
from treeattn.decoder import plan as routes
from treeattn.decoder.plan import CATALOG, select
from treeattn.decoder.planned import PlannedDecode
from treeattn.decoder.request import Reduction, Request
from treeattn.errors import RestrictionError
from treeattn.study.compare import wire, yardsticks
from treeattn.study.compare.schema import NULL, SUM, Key


def shape_of(key: Key) -> Shape:
    """The shape of a key's q, k and v. Raises `ArgumentError`."""
    return Shape(key.batch, key.queries, key.heads, key.kv_heads, key.head_dim, key.dtype)


def reduces(scheme: str) -> bool:
    """Whether it has a reduction apart from the step: fused schemes attend while they communicate."""
    row = CATALOG.get(scheme.partition(":")[0])
    return row is None or not row.fused


def plan(comm: MpiCommunicator, key: Key, own: Mapping[str, Schedule]) -> PlannedDecode:
    """A planned step of the scheme of `key`, perhaps one of one's `own`, by name. Collective; raises what
    `Decoder` raises, on every rank."""
    if key.scheme in (SUM, NULL):
        return _around(comm, key, None, yardsticks.library_sum if key.scheme == SUM else yardsticks.nothing)
    scheme = own.get(key.scheme, key.scheme)
    if key.wire == "bfloat16":
        return _around(comm, key, select(scheme), _bfloat16)
    output = "heads" if select(scheme).row.scattered else "replicated"
    how = Reduction(scheme, key.transport, key.executor, output)
    return Decoder(comm, **shape_of(key).plain, scheme=how, device=key.device)


def plan_null_merge(comm: MpiCommunicator, key: Key, own: Mapping[str, Schedule]) -> PlannedDecode:
    """The same schedule, messages and executor with merges that do nothing. Collective."""
    return _around(comm, key, select(own.get(key.scheme, key.scheme)), _null_merge)


def _around(
    comm: MpiCommunicator, key: Key, scheme: Selection | None, reducer: Callable[..., Reducer]
) -> PlannedDecode:
    """A decoder around a reduction of another kind."""
    device = devices.find(key.device)
    request = Request(shape_of(key), Reduction("chain"), select("chain"), None, device)

    def route(reduction: ReductionSpec) -> tuple[Schedule | None, Reducer]:
        schedule = scheme and routes.schedule(scheme, comm)
        return schedule, reducer(key, reduction, scheme, schedule)

    return PlannedDecode(routes.plan(comm, lambda: request, route))


def _bfloat16(key: Key, reduction: ReductionSpec, scheme: Selection, schedule: Schedule | None) -> Reducer:
    records = reduction.buffer
    unfit = schedule is None or schedule.result == "scattered" or key.device != "cpu"
    if unfit or records.dtype != np.float32:
        raise RestrictionError(
            f"{key.scheme} cannot send bfloat16: that takes a schedule which leaves every rank all heads, "
            "device='cpu', and inputs other than float64"
        )
    narrow = np.zeros(records.shape, np.uint16)
    of_narrow = reduction._replace(operator=wire.Bfloat16Operator(key.head_dim), buffer=narrow)
    inner = reducers.plan("mpi", scheme, schedule, of_narrow, key.executor)

    def reduce() -> None:
        wire.narrow(records, narrow)
        inner()
        wire.widen(narrow, records)

    around = yardsticks.OneCall(key.scheme, reduce, inner.close)
    around.certificate, around.sent, around.executor = inner.certificate, inner.sent, inner.executor
    around.waits_for = inner.waits_for  # type: ignore[method-assign]
    return around


def _null_merge(key: Key, reduction: ReductionSpec, scheme: Selection, schedule: Schedule | None) -> Reducer:
    operator = NullOperator(key.head_dim, reduction.buffer.dtype)
    return reducers.plan("mpi", scheme, schedule, reduction._replace(operator=operator), key.executor)
