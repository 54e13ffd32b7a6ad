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
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from treeattn.attention import arrays
from treeattn.attention.arrays import AnyArray
from treeattn.attention.mask import Rules
from treeattn.attention.pages import check_lengths
from treeattn.attention.shape import CACHE_DTYPES, DTYPES, Shape, dtype_name, query_dtype, values_of
from treeattn.attention.shard import Shard
from treeattn.backends import device as devices
from treeattn.backends.device import Device
from treeattn.collectives.runtime.communicator import Communicator, Given
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import reproducible as reproducible_devices
from treeattn.decoder.plan import plan, selected
from treeattn.decoder.planned import PlannedDecode, Seen
from treeattn.decoder.request import Reduction, Request
from treeattn.decoder.sight import Sight, Stated
from treeattn.errors import ArgumentError
from treeattn.mpi import communicators
from treeattn.mpi.agreement import Agreement, collectively
from treeattn.partial import Array


def decode(
    q: AnyArray | None,
    k: AnyArray | Shard,
    v: AnyArray | None = None,
    *,
    comm: Given = None,
    scheme: str | Schedule | Reduction | None = None,
    scale: float | None = None,
    lengths: ArrayLike | None = None,
    rules: Rules | None = None,
    q_positions: ArrayLike | None = None,
    begins: ArrayLike | None = None,
    mask: Array | None = None,
    device: str | None = None,
    q_root: int | None = None,
    reproducible: str | None = None,
) -> tuple[Array, Array]:
    """Exact attention of a query over a KV cache of which every rank holds a shard. Collective.

    Plans, runs one step and tears down: in a loop keep a `Decoder`. Arrays are of any library with DLPack or
    the array interface (NumPy, CuPy, torch, JAX) and are read where they lie.

    Parameters
    ----------
    q : [batch, queries, heads, head_dim]
        The query, the same on every rank; float32, float16, bfloat16 (or its bits, uint16), or float64 on
        the CPU.
    k, v : [batch, tokens, kv_heads, head_dim]
        This rank's shard; tokens may be 0 and may differ between ranks. Types as for q. A `Shard` in place
        of k says more: positions, pages, float8 and its scales, latent attention.
    comm : mpi4py.MPI.Intracomm or torch.distributed.ProcessGroup, optional
        The ranks; unless given torch's default group where there is one, else COMM_WORLD.
    scheme : str, Schedule or Reduction, optional
        How partials are merged: a name with its parameters, a schedule of one's own, or a `Reduction`, which
        says how records travel, too, and what ranks take where no scheme is named. The same on every rank.
    scale : float, optional
        Factor of the logits; 1 / sqrt(head_dim) unless given.
    lengths : [batch], optional
        Valid tokens of this rank's shard; all unless given.
    rules : Rules, optional
        What a query may attend to; equal on all ranks.
    q_positions : [queries] or [batch, queries], optional
        Global positions of the queries, in any order; the last ones of each sequence unless given.
    begins : [batch], optional
        Global position at which each sequence begins, the same on every rank: what stands before it, padding
        on the left, is seen by no query, and `leading` counts from it. 0 unless given.
    mask : bool [batch, queries, n] or uint32 [batch, queries, ceil(n / 32)], optional
        Which of the last n tokens of this shard, the draft tokens, each query sees: draft j is bit j % 32 of
        word j // 32. Draft tokens have no place in the shard's positions.
    device : {"cpu", "cuda"}, optional
        Where to compute: where q lies unless given. "cuda" is CuPy's current device.
    q_root : int, optional
        The rank whose q counts and is broadcast; the others may pass None.
    reproducible : {"tokens", "blocks"}, optional
        The bits of out and lse are a function of the set of (key, value) that each query sees: not of the
        ranks, the layout or the order of tokens, nor of the batch, other heads, threads, scheme, executor or
        processor. "blocks": also of which 32 positions, from a multiple of 32 on, are a block, which no
        layout may tear; it costs less. device="cpu" alone. See docs/one-bit-pattern.md.

    Returns
    -------
    out : [batch, queries, heads, v's width]
        float32 (float64 for float64 inputs), in the container of q (of k, where q is broadcast); 0 where a
        query sees no key. Every rank gets the same bits: proved of schedules; of libraries and baselines it
        can only be measured.
    lse : [batch, heads, queries]
        Natural logarithm of the sum of exp(logit); -inf where a query sees no key. Of a `Reduction` with
        ``output="root"`` rank 0 gets both, the others None and None.

    Raises
    ------
    ArgumentError, ScheduleError, RestrictionError, BackendError, TransportError
        On every rank alike.

    Notes
    -----
    Tree Attention, arXiv 2408.04093, section 5: a partial of each rank, folded over the ranks along the
    schedule, divided on every rank.
    """
    comm = communicators.intracomm(comm)
    name, like = ("q", q) if q_root is None else ("k", k.k if isinstance(k, Shard) else k)

    def place() -> Device:
        named = arrays.device_of(name, like) if device is None else device
        if reproducible is None:
            return devices.find(named)
        return reproducible_devices.find(named, reproducible, comm.size)

    broadcast = None if q_root is None else _broadcast_query(comm, place, q, q_root)
    step: tuple[Array, Shard]

    def ask() -> Request:
        nonlocal step
        where, shard = place(), Shard.of(k, v, lengths)
        keys = where.tensor("k", shard.k, shard.dtype)
        given = None if shard.v is None else where.tensor("v", shard.v, shard.dtype)
        values = values_of(keys, given, shard.v_dim, scale)
        query = where.tensor("q", q, None) if broadcast is None else where.from_host(broadcast)
        shape = _shape(query, keys, values, shard)
        tokens = keys.shape[1]
        if shard.block_table is not None:
            pages = where.block_table(shape, shard.block_table).shape[1]
            check_lengths(where.host_lengths(shard.lengths), tokens, pages)
            tokens *= pages
        valid = where.lengths(shape, shard.lengths, tokens)
        step = query, replace(shard, k=keys, v=values, lengths=valid, v_dim=None, positions=None)
        how = Reduction.of(scheme)
        asked = Rules.of(rules, shape.heads)
        chosen = selected(how, comm, where.name)
        request = Request(shape, how, chosen, scale, where, q_root, asked, reproducible=reproducible)
        seen = q_positions, mask, shard.draft_positions, begins
        if (
            not request.asks_positions
            and not request.rules.names
            and all(one is None for one in (shard.positions, *seen))
        ):
            return request
        tables = Sight(request.rules, shape).tables()
        tables.validate(tokens, where.host_lengths(shard.lengths), *seen)
        stands = None if q_positions is None else _named(tables.q_positions)
        first = None if begins is None else _named(np.asarray(begins).astype(np.int64))
        stated = Stated(shard.positions, tuple(tables.draft_begins.tolist()), stands, first)
        return replace(request, stated=stated, masked=mask is not None)

    with PlannedDecode(plan(comm, ask)) as decoder:
        query, shard = step
        seen: Seen = {"q_positions": q_positions, "begins": begins, "mask": mask}
        if shard.block_table is None:
            return _give(decoder(query, shard, **seen), like)
        # What queries see of the table is known only now: who has it wrong tells the others.
        collectively(comm, lambda: decoder.local(query, shard, **seen))
        decoder.reduce()
        return _give(decoder.finish(), like)


def _give(results: tuple[Array, Array], like: object) -> tuple[Array, Array]:
    """In the container of `like`, where this rank is given any."""
    return results if results[0] is None else arrays.give(results, like)


def _shape(q: Array, k: Array, v: Array, shard: Shard) -> Shape:
    """The shape of a call whose arrays fit each other."""
    stored = dtype_name(k, {"uint16": "bfloat16"}.get(str(k.dtype), shard.dtype), CACHE_DTYPES)
    page_size = None if shard.block_table is None else k.shape[1]
    cache = stored, shard.k_scale, shard.v_scale, v.shape[3], page_size
    batch, queries, heads, head_dim = q.shape
    shape = Shape(batch, queries, heads, k.shape[2], head_dim, query_dtype(q), *cache)
    shape.check_query(q)
    shape.check_cache(k, v)
    return shape


def _named(positions: Array) -> str:
    """A few of them, and a digest of all."""
    return f"{positions.tolist()!r:.60} ({hashlib.sha256(positions.tobytes()).hexdigest()[:8]})"


def _broadcast_query(
    comm: Communicator, place: Callable[[], Device], q: AnyArray | None, q_root: object
) -> Array:
    """The query of rank `q_root` as a NumPy array, on every rank; its problems too.

    Which rank that is must be agreed before anything is broadcast.
    """
    host: Array
    with Agreement(comm) as agreed:
        root = _checked_root(q_root, comm.size)
        agreed.must_match = {"q_root": root}
        if comm.rank == root:
            host = _on_host(place(), q)
            agreed.share = host.shape, host.dtype.name
    shape, name = agreed.gathered[root]
    if comm.rank != root:
        host = np.empty(shape, DTYPES[name])
    comm.bcast_array(host, root)
    return host


def _on_host(device: Device, q: AnyArray | None) -> Array:
    q = device.tensor("q", q, None)
    return np.ascontiguousarray(device.to_host(q)).view(DTYPES[query_dtype(q)])


def _checked_root(root: object, size: int) -> int:
    try:
        rank = operator.index(root)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"q_root must be the number of a rank, not {root!r}") from None
    if not 0 <= rank < size:
        raise ArgumentError(f"q_root {rank!r} is not a rank of this communicator: use 0 to {size - 1}")
    return rank
