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
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn import comm as comm_
from treeattn.attention import arrays
from treeattn.attention.shape import DTYPES, Shape, dtype_name
from treeattn.baselines import Sent
from treeattn.decoder import device as devices
from treeattn.decoder import plan as routes
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
    device: str | None = None,
    transport: str | None = None,
    output: str = "replicated",
    dtype: str | None = None,
    q_root: int | None = None,
) -> tuple[Any, Any]:
    """Exact attention of `q` over a KV cache of which every rank of `comm` holds a shard. Collective.

    q: [batch, queries, heads, head_dim], the same on every rank (or only on rank `q_root`, which then
    broadcasts it; the others may pass None). k, v: [batch, tokens, kv_heads, head_dim], this rank's shard;
    tokens may be 0 and may differ between ranks. Arrays of any library with DLPack or the array interface
    (NumPy, CuPy, torch, JAX), read where they lie; float32, float16, bfloat16 (or its bits: uint16 with
    ``dtype="bfloat16"``) or float64. lengths: valid tokens [batch] of this shard, default all.
    scale: default 1 / sqrt(head_dim). comm: default COMM_WORLD.

    device: ``"cpu"`` or ``"cuda"``, the GPU that is CuPy's current one (no float64); None is where q lies.
    transport: how records travel: ``"mpi"`` from the host; from GPUs ``"nccl"``, ``"cuda-mpi"`` or ``"host"``
    (see `treeattn.decoder.transport`). None is the only sensible one, or an error that lists the choices.

    Returns ``out`` like q and the natural-log ``lse`` [batch, heads, queries], float32 (float64 for
    float64 inputs), in the container of q (of k, where q is broadcast). Every rank gets the same bits: proved
    of schedules, but not of a library's reduction nor of a baseline, where it can only be measured. A query
    without any key gives out 0 and lse -inf.
    With ``output="heads"`` (schemes ``head_scatter``, ``head_all_to_all``) each rank gets its slice of the
    heads only: rank r of p heads r*heads//p up to (r+1)*heads//p.

    Plans, runs one step and tears down: in a loop keep a `Decoder`. Raises, on every rank alike,
    `ArgumentError` (shapes, dtypes, values that differ between ranks), `ScheduleError` (unknown scheme),
    `RestrictionError`, `BackendError` or `TransportError`.
    """
    comm = comm_.world() if comm is None else comm
    error: Exception | None = None
    shape = None
    like = q if q_root is None else k
    try:
        if device is None:
            device = arrays.device_of("q" if q_root is None else "k", like)
        where = devices.find(device)
        k, v = where.tensor("k", k, dtype), where.tensor("v", v, dtype)
        if q_root is None:
            q = where.tensor("q", q, dtype)
        else:
            q_root = _checked_root(q_root)
    except Exception as problem:  # whatever it is, the other ranks must not be left waiting
        error = problem
    comm_.agree(comm, {} if error else {"q_root": q_root}, error)
    if q_root is not None:
        q = _broadcast_query(comm, where, q, dtype, q_root)
    try:
        if q_root is not None:
            q = where.from_host(q)
        raw = "bfloat16" if q.dtype == np.uint16 else None
        shape = Shape(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[3], dtype_name(q, raw))
        shape.check_query(q)
        shape.check_cache(k, v)
        lengths = where.lengths(shape, lengths, k.shape[1])
    except Exception as problem:
        error = problem
    comm_.agree(comm, {"the shape or dtype of q, k, v": shape}, error)
    assert shape is not None
    with Decoder(
        comm,
        **asdict(shape),
        scheme=scheme,
        scale=scale,
        device=where.name,
        transport=transport,
        output=output,
    ) as decoder:
        return arrays.give(decoder(q, k, v, lengths=lengths), like)


class Decoder:
    """A planned `decode`: everything that can be done once is done once. Creating it is collective.

    Arguments as for `decode`; shapes and dtype are fixed here, the shard's tokens may change with every
    call (a growing cache is passed as a longer array, or as the same array with larger `lengths`).
    A call returns (out, lse) in the decoder's own buffers, which hold until its next call; in the container
    of q, and where that cannot share memory that changes (JAX), as copies. `device` has to be said: here
    nothing is known of q.

    `schedule` and `certificate` tell what was planned (None where no schedule is run), `transport` how its
    records travel; `heads` is the slice of query heads that out and lse cover, all of them unless
    ``output="heads"``. `local`, `reduce` and `finish` are the three parts of a call, for those who overlap or
    time them; where a ring computes while it communicates (`kv_ring`, `query_ring`), the first two are halves
    of one thing.
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
            self._device = devices.find(device)
            slow = self._device.slow_because()
            self.shape = Shape(batch, queries, heads, kv_heads, head_dim, dtype)
            self._device.check_shape(self.shape)
            self.scale = _checked_scale(self.shape.default_scale() if scale is None else scale)
            self.scheme = routes.canonical(scheme)
            self._plan_memory(_own_heads(heads, output, comm))
            self._attention = self._device.attention(self.shape, self.records, self.scale)
            self._finish = self._device.finish(self._own, self.out, self.lse)
            self._containers = arrays.Containers(self._device.view, (self.out, self.lse))
            settings = {
                "the shape or dtype of q, k, v": self.shape,
                "scale": self.scale,
                "scheme": self.scheme,
                "device": device,
                "transport": transport,
                "output": output,
            }
        except Exception as problem:  # whatever it is, the other ranks must not be left waiting
            error = problem
        comm_.agree(comm, settings, error)
        _warn_once_without_compiler(comm, slow)
        self.schedule = routes.schedule(self.scheme, comm)
        routes.check_output(self.scheme, output)
        self._attention, self._reducer, self.transport = routes.plan(
            comm,
            self._device,
            transport,
            self.scheme,
            self.schedule,
            self.shape,
            self.scale,
            self._attention,
            self.records,
            self._reduced,
        )
        self.certificate = None if self.schedule is None else self._reducer.certificate
        self._comm = comm
        self._captured: list[CapturedStep] = []

    def _plan_memory(self, heads: slice) -> None:
        """Records as the kernel writes them, as the reducer cuts them, and this rank's part of the result.

        A scattered schedule cuts the records by heads, so they must be head-major on the wire: for one
        sequence they are; for several, `reduce` reorders into a second buffer.
        """
        batch, all_heads, queries = self.shape.lse_shape
        width, dtype, empty = self.shape.head_dim + 2, self.shape.record_dtype, self._device.empty
        self.heads = heads
        own = heads.stop - heads.start
        self.records = empty((batch, all_heads, queries, width), dtype)
        whole = own == all_heads
        self._reordered = batch > 1 and not whole
        self._reduced = empty((all_heads, batch, queries, width), dtype) if self._reordered else self.records
        self._own = self.records if whole else empty((batch, own, queries, width), dtype)
        self.out = empty((batch, queries, own, self.shape.head_dim), dtype)
        self.lse = empty((batch, own, queries), dtype)

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
        q, k, v = self._containers.take(q, k, v)
        self._attention(q, k, v, self._device.admit(self.shape, q, k, v, lengths))

    def reduce(self) -> None:
        """Fold the partials of all ranks. Collective."""
        if self._reordered:
            self._device.copy(self._reduced, self.records.transpose(1, 0, 2, 3))
        self._reducer()
        if self._own is not self.records:
            head_major = self._reduced if self._reordered else self._reduced.transpose(1, 0, 2, 3)
            self._device.copy(self._own, head_major[self.heads].transpose(1, 0, 2, 3))

    def finish(self) -> tuple[Any, Any]:
        """(out, lse) from the folded records, in the container of the q that `local` was given."""
        self._finish()
        return self._containers.give()

    @property
    def sent(self) -> list[tuple[int, int]] | Sent | None:
        """What this rank hands to MPI in a step.

        (destination, bytes) of every message; the payload of a library's collectives; None where only the
        library knows.
        """
        sent: list[tuple[int, int]] | Sent | None = getattr(self._reducer, "sent", None)
        return sent

    def capture(self, q: Any, k: Any, v: Any, lengths: Any = None) -> CapturedStep:
        """The whole step over arrays that stay where they are, as one CUDA graph. Collective.

        Runs one step, then records one. Calling the result is one launch on the current stream and gives
        (out, lse) as a call of the decoder does; it reads what q, k, v and lengths (an int64 device array,
        or None for all) hold then, so a cache may grow within them. Every rank must call it in the same step:
        NCCL allows a captured step on all ranks or on none. It ends with the decoder.

        Raises `BackendError` unless ``device="cuda"``, `TransportError` where the host moves the records.
        """
        if not self._device.queues:
            raise BackendError("a captured step is a CUDA graph: it needs device='cuda'")
        sends_nothing = self._comm.size == 1 and self.transport == "mpi"
        if self.transport != "nccl" and not sends_nothing:
            raise TransportError(
                f"transport={self.transport!r} moves records by the host, which a CUDA graph cannot: "
                "a captured step needs transport='nccl', or one rank without a transport"
            )

        containers = arrays.Containers(self._device.view, (self.out, self.lse))

        def taken() -> tuple[Any, ...]:
            queries, keys, values = views = containers.take(q, k, v)
            if lengths is not self._device.admit(self.shape, queries, keys, values, lengths):
                raise ArgumentError("lengths of a captured step must be an int64 device array")
            return views

        q, k, v = comm_.together(self._comm, taken)
        self(q, k, v, lengths)
        launch = self._device.capture(lambda: self(q, k, v, lengths))
        step = CapturedStep(launch, containers.give, (self, q, k, v, lengths))
        self._captured.append(step)
        return step

    def close(self) -> None:
        """Release communicator and requests. Collective."""
        self._drop_captured()
        self._reducer.close()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._drop_captured()
        self._reducer.__exit__(*exception)

    def _drop_captured(self) -> None:
        """Graphs go before the communicator that they use."""
        while self._captured:
            self._captured.pop().drop()


class CapturedStep:
    """What `Decoder.capture` makes."""

    def __init__(
        self, launch: Callable[[], object], give: Callable[[], tuple[Any, Any]], owners: tuple[Any, ...]
    ) -> None:
        self._launch: Callable[[], object] | None = launch
        self._give = give
        self._owners = owners  # of the memory that the graph works on: it knows addresses only

    def __call__(self) -> tuple[Any, Any]:
        """One launch: (out, lse), valid until the decoder's next step."""
        if self._launch is None:
            raise ArgumentError("the decoder of this captured step is closed")
        self._launch()
        return self._give()

    def drop(self) -> None:
        """Give the graph back."""
        self._launch, self._owners = None, ()


def _checked_scale(scale: float) -> float:
    try:
        value = float(scale)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise ArgumentError(f"scale must be a finite number, not {scale!r}")
    return value


def _checked_root(root: object) -> int:
    """A whole number; that it is a rank is checked once all ranks know it."""
    try:
        return operator.index(root)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"q_root must be the number of a rank, not {root!r}") from None


def _own_heads(heads: int, output: str, comm: Intracomm) -> slice:
    """The heads that this rank's result covers."""
    if output == "replicated":
        return slice(0, heads)
    if output == "heads":
        return slice(comm.rank * heads // comm.size, (comm.rank + 1) * heads // comm.size)
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


def _broadcast_query(comm: Intracomm, device: devices.Device, q: Any, dtype: str | None, root: int) -> Any:
    """The query of rank `root` as a NumPy array, on every rank; its problems too."""
    if not 0 <= root < comm.size:
        raise ArgumentError(f"q_root {root!r} is not a rank of this communicator: use 0 to {comm.size - 1}")
    outcome: Any = None
    host: Any = None
    if comm.rank == root:
        try:
            q = device.tensor("q", q, dtype)
            name = dtype_name(q, "bfloat16" if q.dtype == np.uint16 else None)
            host = np.ascontiguousarray(device.to_host(q)).view(DTYPES[name])
            outcome = (host.shape, name)
        except TreeattnError as problem:
            outcome = problem
        except Exception as problem:  # whatever it is, the other ranks must not be left waiting
            outcome = ArgumentError(f"{type(problem).__name__}: {problem}")
    outcome = comm.bcast(outcome, root=root)
    if isinstance(outcome, TreeattnError):
        raise type(outcome)(f"rank {root}: {outcome}")
    if comm.rank != root:
        host = np.empty(outcome[0], DTYPES[outcome[1]])
    comm.Bcast(host.view(np.uint8), root=root)
    return host
