"""The verb: local partial -> reduce over ranks -> finish.

Each rank computes attention of the query over *its* tokens as one partial per query head (the paper's
equations 4 to 6 with the running maximum kept), the reducer folds the partials of all ranks along the
chosen schedule, and every rank divides. Exact whatever the schedule, the sharding or the order
(Tree Attention, arXiv 2408.04093, section 5).
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn import collectives, comm as comm_
from treeattn.arguments import DTYPES, Shape, as_tensor, dtype_name
from treeattn.backends import cpu
from treeattn.collectives.schedule import Schedule
from treeattn.errors import ArgumentError, BackendError, RestrictionError, TransportError, TreeattnError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Decoder", "decode", "schemes"]


def schemes() -> list[str]:
    """Every name that ``scheme=`` takes."""
    return collectives.names()


def decode(
    q: Any,
    k: Any,
    v: Any,
    *,
    comm: Intracomm | None = None,
    scheme: str = "binary_tree",
    scale: float | None = None,
    lengths: Any = None,
    device: str = "cpu",
    transport: str | None = None,
    output: str = "replicated",
    dtype: str | None = None,
    q_root: int | None = None,
) -> tuple[Any, Any]:
    """Exact attention of `q` over a KV cache of which every rank of `comm` holds a shard. Collective.

    q: [batch, queries, heads, head_dim], the same on every rank (or only on rank `q_root`, which then
    broadcasts it; the others may pass None). k, v: [batch, tokens, kv_heads, head_dim], this rank's shard;
    tokens may be 0 and may differ between ranks. float32, float16, bfloat16 (ml_dtypes, or uint16 with
    ``dtype="bfloat16"``) or float64. lengths: valid tokens [batch] of this shard, default all.
    scale: default 1 / sqrt(head_dim). comm: default COMM_WORLD.

    Returns ``out`` like q and the natural-log ``lse`` [batch, heads, queries], float32 (float64 for
    float64 inputs), with the same bits on every rank. A query without any key gives out 0 and lse -inf.

    Plans, runs one step and tears down: in a loop keep a `Decoder`. Raises, on every rank alike,
    `ArgumentError` (shapes, dtypes, values that differ between ranks), `ScheduleError` (unknown scheme),
    `RestrictionError`, `BackendError` or `TransportError`.
    """
    comm = comm_.world() if comm is None else comm
    error: TreeattnError | None = None
    shape = None
    try:
        _check_choices(device, transport, output)
        k, v = as_tensor("k", k, dtype), as_tensor("v", v, dtype)
        if q_root is None:
            q = as_tensor("q", q, dtype)
    except TreeattnError as problem:
        error = problem
    comm_.agree(comm, {"q_root": q_root}, error)
    if q_root is not None:
        q = _broadcast_query(comm, q, dtype, q_root)
    try:
        shape = Shape(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[3], dtype_name(q))
        shape.check_query(q)
        shape.check_cache(k, v)
        if lengths is not None:
            lengths = shape.check_lengths(lengths, k.shape[1])
    except TreeattnError as problem:
        error = problem
    comm_.agree(comm, {"the shape or dtype of q, k, v": shape}, error)
    assert shape is not None
    with Decoder(
        comm,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        batch=shape.batch,
        queries=shape.queries,
        dtype=shape.dtype,
        scheme=scheme,
        scale=scale,
        device=device,
        transport=transport,
        output=output,
    ) as decoder:
        return decoder(q, k, v, lengths=lengths)


class Decoder:
    """A planned `decode`: everything that can be done once is done once. Creating it is collective.

    Arguments as for `decode`; shapes and dtype are fixed here, the shard's tokens may change with every
    call (a growing cache is passed as a longer array, or as the same array with larger `lengths`).
    A call returns (out, lse) in the decoder's own buffers, which hold until its next call.

    `schedule` and `certificate` tell what was planned; `local`, `reduce` and `finish` are the three parts
    of a call, for those who overlap or time them.
    """

    def __init__(
        self,
        comm: Intracomm | None = None,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        batch: int = 1,
        queries: int = 1,
        dtype: str = "bfloat16",
        scheme: str = "hierarchical",
        scale: float | None = None,
        device: str = "cpu",
        transport: str | None = None,
        output: str = "replicated",
    ) -> None:
        comm = comm_.world() if comm is None else comm
        error: TreeattnError | None = None
        settings: dict[str, object] = {}
        try:
            shape = Shape(batch, queries, heads, kv_heads, head_dim, dtype)
            scale = _checked_scale(shape.default_scale() if scale is None else scale)
            scheme = collectives.canonical(scheme)
            _check_choices(device, transport, output)
            settings = {
                "the shape or dtype of q, k, v": shape,
                "scale": scale,
                "scheme": scheme,
                "device": device,
                "output": output,
            }
        except TreeattnError as problem:
            error = problem
        comm_.agree(comm, settings, error)
        _warn_once_without_compiler(comm)
        self.shape, self.scale, self.scheme = shape, scale, scheme
        self.schedule = _planned(scheme, comm)
        _check_output(scheme, self.schedule, output)
        self.records = np.empty((*shape.lse_shape, head_dim + 2), shape.record_dtype)
        self.out = np.empty(shape.q_shape, shape.record_dtype)
        self.lse = np.empty(shape.lse_shape, shape.record_dtype)
        self._checked: tuple[Any, Any, Any] = (None, None, None)
        self._attention = cpu.PlannedAttention(self.records, scale=scale)
        self._finish = cpu.planned_finish(self.records, self.out, self.lse)
        operator = cpu.MergeOperator(head_dim, shape.record_dtype)
        self._reducer = _reducer(comm, self.schedule, operator, self.records)
        self.certificate = self._reducer.certificate

    def __call__(self, q: Any, k: Any, v: Any, lengths: Any = None) -> tuple[Any, Any]:
        """One step: (out, lse), valid until the next call. Every rank must call.

        Raises `ArgumentError` for arrays that do not fit the plan; on one rank alone, since a step that
        agreed first would cost as much as the reduction: let it end the job (python -m mpi4py).
        """
        self.local(q, k, v, lengths)
        self.reduce()
        return self.finish()

    def local(self, q: Any, k: Any, v: Any, lengths: Any = None) -> None:
        """This rank's partials, from its own tokens, into the records buffer."""
        if self._checked[0] is not q or self._checked[1] is not k or self._checked[2] is not v:
            self._check(q, k, v)
        if lengths is not None:
            lengths = self.shape.check_lengths(lengths, k.shape[1])
        self._attention(q, k, v, lengths)

    def _check(self, q: Any, k: Any, v: Any) -> None:
        """Once for every new array object: a cache that is passed again and again costs nothing more."""
        raw = "bfloat16" if self.shape.dtype == "bfloat16" else None
        self.shape.check_query(as_tensor("q", q, raw))
        self.shape.check_cache(as_tensor("k", k, raw), as_tensor("v", v, raw))
        self._checked = (q, k, v)

    def reduce(self) -> None:
        """Fold the partials of all ranks. Collective."""
        self._reducer()

    def finish(self) -> tuple[Any, Any]:
        """(out, lse) from the folded records."""
        self._finish()
        return self.out, self.lse

    def close(self) -> None:
        """Release communicator and requests. Collective."""
        self._reducer.close()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._reducer.__exit__(*exception)


@functools.lru_cache(maxsize=32)
def _built(scheme: str, size: int, nodes: tuple[tuple[int, ...], ...] | None) -> Schedule:
    return collectives.build(scheme, size, **({} if nodes is None else {"nodes": nodes}))


def _planned(scheme: str, comm: Intracomm) -> Schedule:
    """The schedule of `scheme` for `comm`; node groups come from the machine where they are not given."""
    nodes = comm_.node_groups(comm) if collectives.needs_nodes(scheme) else None
    return _built(scheme, comm.size, nodes)


def _reducer(comm: Intracomm, schedule: Schedule, operator: Any, records: Any) -> Any:
    from treeattn.collectives.executors.mpi import Reducer

    return Reducer(comm, schedule, operator, records)


def _checked_scale(scale: float) -> float:
    try:
        value = float(scale)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ArgumentError(f"scale must be a finite number, not {scale!r}")
    return value


def _check_choices(device: str, transport: str | None, output: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ArgumentError(f"device {device!r} is unknown: use 'cpu' or 'cuda'")
    if device == "cuda":
        raise BackendError("device='cuda' is not part of this version: use device='cpu'")
    if transport not in (None, "mpi"):
        raise TransportError(f"transport {transport!r} does not serve device='cpu': use 'mpi' or None")
    if output not in ("replicated", "heads"):
        raise ArgumentError(f"output {output!r} is unknown: use 'replicated' or 'heads'")


def _check_output(scheme: str, schedule: Schedule, output: str) -> None:
    if (schedule.result == "scattered") != (output == "heads"):
        raise RestrictionError(
            f"scheme {scheme} leaves the result {schedule.result}, which output={output!r} does not fit"
        )


def _warn_once_without_compiler(comm: Intracomm) -> None:
    """The merge has the same bits with and without the compiled kernels, so ranks may differ here."""
    problems = comm.allgather(cpu.compiled_kernels_problem())
    lacking = [rank for rank, problem in enumerate(problems) if problem]
    if lacking and comm.rank == 0:
        warnings.warn(
            f"{len(lacking)} of {comm.size} ranks run on NumPy instead of the compiled CPU kernels, several "
            f"times slower: {problems[lacking[0]]}",
            RuntimeWarning,
            stacklevel=3,
        )


def _broadcast_query(comm: Intracomm, q: Any, dtype: str | None, root: int) -> Any:
    """The query of rank `root`, on every rank; its problems too."""
    if not isinstance(root, int) or not 0 <= root < comm.size:
        raise ArgumentError(f"q_root {root!r} is not a rank of this communicator: use 0 to {comm.size - 1}")
    outcome: Any = None
    if comm.rank == root:
        try:
            q = np.ascontiguousarray(as_tensor("q", q, dtype))
            outcome = (q.shape, dtype_name(q))
        except TreeattnError as problem:
            outcome = problem
    outcome = comm.bcast(outcome, root=root)
    if isinstance(outcome, TreeattnError):
        raise type(outcome)(f"rank {root}: {outcome}")
    if comm.rank != root:
        q = np.empty(outcome[0], DTYPES[outcome[1]])
    comm.Bcast(q.view(np.uint8), root=root)
    return q
