"""The verb: local partial -> reduce over ranks -> finish.

Each rank computes attention of the query over *its* tokens as one partial per query head (the paper's
equations 4 to 6 with the running maximum kept), the reducer folds the partials of all ranks along the
chosen schedule, and every rank divides. Exact whatever the schedule, the sharding or the order
(Tree Attention, arXiv 2408.04093, section 5).
"""

from __future__ import annotations

import math
import operator
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn import comm as comm_
from treeattn import routes
from treeattn.arguments import DTYPES, Shape, as_tensor, dtype_name
from treeattn.backends import cpu
from treeattn.baselines import Sent
from treeattn.errors import ArgumentError, BackendError, TransportError, TreeattnError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Decoder", "decode", "schemes"]


def schemes() -> list[str]:
    """Every name that ``scheme=`` takes."""
    return list(routes.CATALOG)


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
    With ``output="heads"`` (schemes ``head_scatter``, ``head_all_to_all``) each rank gets its slice of the
    heads only: rank r of p heads r*heads//p up to (r+1)*heads//p.

    Plans, runs one step and tears down: in a loop keep a `Decoder`. Raises, on every rank alike,
    `ArgumentError` (shapes, dtypes, values that differ between ranks), `ScheduleError` (unknown scheme),
    `RestrictionError`, `BackendError` or `TransportError`.
    """
    comm = comm_.world() if comm is None else comm
    error: Exception | None = None
    shape = None
    try:
        _check_choices(device, transport, output)
        k, v = as_tensor("k", k, dtype), as_tensor("v", v, dtype)
        if q_root is None:
            q = as_tensor("q", q, dtype)
        else:
            q_root = operator.index(q_root)
    except Exception as problem:  # whatever it is, the other ranks must not be left waiting
        error = problem
    comm_.agree(comm, {} if error else {"q_root": q_root}, error)
    if q_root is not None:
        q = _broadcast_query(comm, q, dtype, q_root)
    try:
        shape = Shape(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[3], dtype_name(q))
        shape.check_query(q)
        shape.check_cache(k, v)
        if lengths is not None:
            lengths = shape.check_lengths(lengths, k.shape[1])
    except Exception as problem:
        error = problem
    comm_.agree(comm, {"the shape or dtype of q, k, v": shape}, error)
    assert shape is not None
    with Decoder(
        comm,
        **asdict(shape),
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

    `schedule` and `certificate` tell what was planned (None where no schedule is run); `heads` is the slice
    of query heads that out and lse cover, all of them unless ``output="heads"``. `local`, `reduce` and
    `finish` are the three parts of a call, for those who overlap or time them; where a ring computes while it
    communicates (`kv_ring`, `query_ring`), the first two are halves of one thing.
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
        error: Exception | None = None
        settings: dict[str, object] = {}
        slow = None
        try:
            slow = cpu.compiled_kernels_problem()
            cpu.check_environment()
            shape = Shape(batch, queries, heads, kv_heads, head_dim, dtype)
            self.scale = _checked_scale(shape.default_scale() if scale is None else scale)
            scheme = routes.canonical(scheme)
            _check_choices(device, transport, output)
            settings = {
                "the shape or dtype of q, k, v": shape,
                "scale": self.scale,
                "scheme": scheme,
                "device": device,
                "output": output,
            }
        except Exception as problem:  # whatever it is, the other ranks must not be left waiting
            error = problem
        comm_.agree(comm, settings, error)
        _warn_once_without_compiler(comm, slow)
        self.shape, self.scheme = shape, scheme
        self.schedule = routes.schedule(scheme, comm)
        routes.check_output(scheme, output)
        self.heads = slice(0, heads)
        if output == "heads":
            self.heads = slice(comm.rank * heads // comm.size, (comm.rank + 1) * heads // comm.size)
        self._plan_buffers()
        self._attention, self._reducer = routes.plan(
            comm, scheme, self.schedule, shape, self.scale, self.records, self._reduced
        )
        self._finish = cpu.planned_finish(self._own, self.out, self.lse)
        self.certificate = None if self.schedule is None else self._reducer.certificate

    def _plan_buffers(self) -> None:
        """Records as the kernel writes them, as the reducer cuts them, and this rank's part of the result.

        A scattered schedule cuts the records by heads, so they must be head-major on the wire: for one
        sequence they are; for several, `reduce` reorders into a second buffer.
        """
        batch, heads, queries = self.shape.lse_shape
        width, dtype = self.shape.head_dim + 2, self.shape.record_dtype
        own = self.heads.stop - self.heads.start
        self.records = np.empty((batch, heads, queries, width), dtype)
        whole = own == heads
        self._reordered = batch > 1 and not whole
        self._reduced = np.empty((heads, batch, queries, width), dtype) if self._reordered else self.records
        self._own = self.records if whole else np.empty((batch, own, queries, width), dtype)
        self.out = np.empty((batch, queries, own, self.shape.head_dim), dtype)
        self.lse = np.empty((batch, own, queries), dtype)

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
        if not self.shape.accepts(q, k, v):
            self._check(q, k, v)
        if lengths is not None and not (type(lengths) is np.ndarray and lengths.dtype == np.int64):
            lengths = self.shape.check_lengths(lengths, k.shape[1])
        self._attention(q, k, v, lengths)  # checks shape and range of the lengths itself

    def _check(self, q: Any, k: Any, v: Any) -> None:
        """Say what is wrong; what passes here is rare but right (bfloat16 as uint16, no tokens)."""
        raw = "bfloat16" if self.shape.dtype == "bfloat16" else None
        self.shape.check_query(as_tensor("q", q, raw))
        self.shape.check_cache(as_tensor("k", k, raw), as_tensor("v", v, raw))

    def reduce(self) -> None:
        """Fold the partials of all ranks. Collective."""
        if self._reordered:
            np.copyto(self._reduced, self.records.transpose(1, 0, 2, 3))
        self._reducer()
        if self._own is not self.records:
            head_major = self._reduced if self._reordered else self._reduced.transpose(1, 0, 2, 3)
            np.copyto(self._own, head_major[self.heads].transpose(1, 0, 2, 3))

    def finish(self) -> tuple[Any, Any]:
        """(out, lse) from the folded records."""
        self._finish()
        return self.out, self.lse

    @property
    def sent(self) -> list[tuple[int, int]] | Sent | None:
        """What this rank hands to MPI in a step: (destination, bytes) of every message; of a library's
        collectives the payload; None where only the library knows."""
        sent: list[tuple[int, int]] | Sent | None = getattr(self._reducer, "sent", None)
        return sent

    def close(self) -> None:
        """Release communicator and requests. Collective."""
        self._reducer.close()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._reducer.__exit__(*exception)


def _checked_scale(scale: float) -> float:
    try:
        value = float(scale)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise ArgumentError(f"scale must be a finite number, not {scale!r}")
    return value


def _check_choices(device: str, transport: str | None, output: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ArgumentError(f"device {device!r} is unknown: use 'cpu' or 'cuda'")
    if device == "cuda":
        raise BackendError("device='cuda' has kernels but no transport in this version: use device='cpu'")
    if transport not in (None, "mpi"):
        raise TransportError(f"transport {transport!r} does not serve device='cpu': use 'mpi' or None")
    if output not in ("replicated", "heads"):
        raise ArgumentError(f"output {output!r} is unknown: use 'replicated' or 'heads'")


def _warn_once_without_compiler(comm: Intracomm, problem: str | None) -> None:
    """The merge has the same bits with and without the compiled kernels, so ranks may differ here."""
    problems = comm.allgather(problem)
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
    if not 0 <= root < comm.size:
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
