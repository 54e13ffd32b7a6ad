"""The verb: local partial -> reduce over ranks -> finish, once.

Each rank computes attention of the query over *its* tokens as one partial per query head (the paper's
equations 4 to 6 with the running maximum kept), the reducer folds the partials of all ranks along the
chosen schedule, and every rank divides. Exact whatever the schedule, the sharding or the order
(Tree Attention, arXiv 2408.04093, section 5).
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn import comm as comm_
from treeattn.attention import arrays
from treeattn.attention.pages import check_lengths
from treeattn.attention.shape import CACHE_DTYPES, DTYPES, Shape, dtype_name, values_of
from treeattn.attention.visibility import Visibility
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import device as devices
from treeattn.decoder.decoder import Decoder
from treeattn.decoder.device import Device
from treeattn.decoder.plan import CATALOG, plan, select
from treeattn.decoder.request import Request
from treeattn.decoder.sight import Sight, Stated
from treeattn.errors import ArgumentError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["decode", "schemes"]


def schemes() -> list[str]:
    """Every name that ``scheme=`` takes."""
    return [name for name, row in CATALOG.items() if row.transports]


def decode(
    q: Any,
    k: Any,
    v: Any = None,
    *,
    comm: Intracomm | None = None,
    scheme: str | Schedule = "hierarchical",
    scale: float | None = None,
    lengths: Any = None,
    device: str | None = None,
    transport: str | None = None,
    output: str = "replicated",
    dtype: str | None = None,
    cache_dtype: str | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    q_root: int | None = None,
    executor: str | None = None,
    positions: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    leading: int = 0,
    softcap: float | None = None,
    alibi: Any = None,
    sink_logits: Any = None,
    q_positions: Any = None,
    mask: Any = None,
    draft_positions: Any = None,
    v_dim: int | None = None,
    block_table: Any = None,
) -> tuple[Any, Any]:
    """Exact attention of `q` over a KV cache of which every rank of `comm` holds a shard. Collective.

    q: [batch, queries, heads, head_dim], the same on every rank (or only on rank `q_root`, which then
    broadcasts it; the others may pass None). k, v: [batch, tokens, kv_heads, head_dim], this rank's shard;
    tokens may be 0 and may differ between ranks. Arrays of any library with DLPack or the array interface
    (NumPy, CuPy, torch, JAX), read where they lie; float32, float16, bfloat16 (or its bits: uint16 with
    ``dtype="bfloat16"``) or float64. k and v may be of another type than q, float8_e4m3fn and
    float8_e5m2 of ml_dtypes too, or uint8 with the bits of what ``cache_dtype`` names: with `k_scale` and
    `v_scale`, a number or one for each KV head, the same on every rank, of which a stored element is to be
    multiplied. lengths: valid tokens [batch] of this shard, default all.
    v may have another width than k, [.., v_dim]: so has out then. Latent attention: v=None and v_dim, how
    many of k's first channels are the values; the scale has to be given (on a GPU keys of 576, v_dim 512).
    block_table: k and v are this rank's pages, [pages, page_size, kv_heads, head_dim], and the integers
    [batch, pages of a sequence] those in which its tokens lie, in the order of `positions`; -1 where there is
    none, or nobody sees a token of it. lengths are needed then. Sequences may share pages, which are of one
    size on all ranks.
    scale: default 1 / sqrt(head_dim). comm: default COMM_WORLD. scheme: a name with its parameters, or a
    `treeattn.collectives.Schedule` of one's own, the same on every rank; ``"auto"`` chooses by simulation
    (`treeattn.decoder.auto`).

    device: ``"cpu"`` or ``"cuda"``, the GPU that is CuPy's current one (no float64); None is where q lies.
    transport: how records travel: ``"mpi"`` from the host; from GPUs ``"nccl"``, ``"peer"``, ``"cuda-mpi"``
    or ``"host"`` (see `treeattn.decoder.transport`). None is the only sensible one, or an error that lists
    them. executor: who runs the rounds of a schedule on the host: ``"slots"`` or ``"program"``, compiled, or
    ``"mpi"``, Python (see `treeattn.decoder.executor`). None is the fastest that all ranks can have; the bits
    are the same.

    What a query sees, on any sharding (rules must be equal on all ranks): a key at global position s is
    visible from t when (not `causal` or s <= t) and (no `window`, or t - left <= s <= t + right, None being
    unbounded, or s < `leading`). Of a logit x, `softcap` makes softcap * tanh(x / softcap); `alibi` [heads]
    then takes slope * (t - s) away. `sink_logits` [heads]: of one more key with the value 0, in lse too.
    positions: of this shard's tokens, ascending: integers [tokens], runs (start, step, count), slices, or a
    layout of `treeattn.shards` such as ``"zigzag"``; default: the shards' blocks follow one another.
    q_positions: [queries] or [batch, queries], any order; default: the last ones of each sequence.
    Draft tokens are the last n of this shard (of each sequence's `lengths`), have no place in `positions`,
    and are seen where `mask` says so: bool [batch, queries, n], or uint32 [batch, queries, ceil(n / 32)] with
    bit j % 32 of word j // 32; draft_positions [n] or [batch, n] are for ALiBi.

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
    comm = comm_.intracomm(comm)
    name, like = ("q", q) if q_root is None else ("k", k)

    def place() -> Device:
        return devices.find(arrays.device_of(name, like) if device is None else device)

    if q_root is not None:
        q = _broadcast_query(comm, place, q, dtype, q_root)
    step: tuple[Any, ...] = ()

    def ask() -> Request:
        nonlocal step
        where = place()
        stored = cache_dtype or dtype
        keys = where.tensor("k", k, stored)
        values = values_of(keys, v, v_dim, scale)
        ours = keys, values if v is None else where.tensor("v", v, stored)
        query = where.tensor("q", q, dtype) if q_root is None else where.from_host(q)
        elements = dtype_name(query, "bfloat16" if query.dtype == np.uint16 else None)
        batch, queries, heads, head_dim = query.shape
        page_size = None if block_table is None else keys.shape[1]
        cache = cache_name(keys), k_scale, v_scale, ours[1].shape[3], page_size
        shape = Shape(batch, queries, heads, keys.shape[2], head_dim, elements, *cache)
        shape.check_query(query)
        shape.check_cache(*ours)
        rules = Visibility.of(
            heads,
            causal=causal,
            window=window,
            leading=leading,
            softcap=softcap,
            alibi=alibi,
            sink_logits=sink_logits,
        )
        tokens = keys.shape[1]
        if page_size is not None:
            pages = where.block_table(shape, block_table).shape[1]
            check_lengths(where.host_lengths(lengths), page_size, pages)
            tokens = pages * page_size
        step = query, *ours, where.lengths(shape, lengths, tokens)
        stated = Stated()
        if rules.rules or any(one is not None for one in (positions, q_positions, mask, draft_positions)):
            tables = Sight(rules, shape).tables()
            tables.try_out(tokens, where.host_lengths(lengths), q_positions, mask, draft_positions)
            stands = None if q_positions is None else _named(tables.q_positions)
            stated = Stated(positions, tuple(tables.draft_begins.tolist()), stands)
        return Request(
            *(shape, select(scheme), scale, where, transport, output, q_root, executor),
            rules=rules,
            stated=stated,
            masked=mask is not None,
        )

    def cache_name(array: Any) -> str:
        carried = {"uint16": "bfloat16", "uint8": cache_dtype}.get(str(array.dtype))
        return dtype_name(array, carried, CACHE_DTYPES)

    with Decoder.of(comm, plan(comm, ask)) as decoder:
        seen = {"q_positions": q_positions, "mask": mask, "draft_positions": draft_positions}
        if block_table is None:
            return arrays.give(decoder(*step, **seen), like)
        # What queries see of the table is known only now: who has it wrong tells the others.
        comm_.together(comm, lambda: decoder.local(*step, **seen, block_table=block_table))
        decoder.reduce()
        return arrays.give(decoder.finish(), like)


def _named(positions: Any) -> str:
    """A few of them, and a digest of all."""
    return f"{positions.tolist()!r:.60} ({hashlib.sha256(positions.tobytes()).hexdigest()[:8]})"


def _broadcast_query(
    comm: Intracomm, place: Callable[[], Device], q: Any, dtype: str | None, q_root: Any
) -> Any:
    """The query of rank `q_root` as a NumPy array, on every rank; its problems too.

    Which rank that is must be agreed before anything is broadcast.
    """
    host: Any = None
    with comm_.Agreement(comm) as agreed:
        root = _checked_root(q_root, comm.size)
        agreed.equal = {"q_root": root}
        if comm.rank == root:
            host = _on_host(place(), q, dtype)
            agreed.told = host.shape, host.dtype.name
    shape, name = agreed.everywhere[root]
    if comm.rank != root:
        host = np.empty(shape, DTYPES[name])
    comm.Bcast(host.view(np.uint8), root=root)
    return host


def _on_host(device: Device, q: Any, dtype: str | None) -> Any:
    q = device.tensor("q", q, dtype)
    name = dtype_name(q, "bfloat16" if q.dtype == np.uint16 else None)
    return np.ascontiguousarray(device.to_host(q)).view(DTYPES[name])


def _checked_root(root: object, size: int) -> int:
    try:
        rank = operator.index(root)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"q_root must be the number of a rank, not {root!r}") from None
    if not 0 <= rank < size:
        raise ArgumentError(f"q_root {rank!r} is not a rank of this communicator: use 0 to {size - 1}")
    return rank
