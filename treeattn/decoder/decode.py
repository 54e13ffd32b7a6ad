"""The verb: local partial -> reduce over ranks -> finish, once.

Each rank computes attention of the query over *its* tokens as one partial per query head (the paper's
equations 4 to 6 with the running maximum kept), the reducer folds the partials of all ranks along the
chosen schedule, and every rank divides. Exact whatever the schedule, the sharding or the order
(Tree Attention, arXiv 2408.04093, section 5).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from treeattn.attention import arrays
from treeattn.attention.arguments import Rules, Shard, read_positions
from treeattn.attention.arrays import AnyArray
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.shape import DTYPES, check_number, query_dtype
from treeattn.backends import device as devices
from treeattn.backends.device import Admitted, Device
from treeattn.collectives.runtime.communicator import Communicator, Given
from treeattn.collectives.schedule import Schedule
from treeattn.decoder.mask_plan import DeclaredPositions, digests
from treeattn.decoder.plan import LocalPlan
from treeattn.decoder.planned import MaskArguments, PlannedDecode
from treeattn.decoder.reducers import selected
from treeattn.decoder.request import Reduction, Request, telling_arguments
from treeattn.errors import ArgumentError
from treeattn.mpi import communicators
from treeattn.mpi.communicators import Agreement, collectively
from treeattn.partial import Array


@telling_arguments
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
        Global position at which each sequence begins, the same on every rank: what is before it, padding
        on the left, is seen by no query, and `leading` counts from it. 0 unless given.
    mask : bool [batch, queries, n], optional
        Which of the last n tokens of this shard, the draft tokens, each query sees. Draft tokens have no
        place in the shard's positions.
    device : {"cpu", "cuda"}, optional
        Where to compute: where q lies unless given. "cuda" is CuPy's current device.
    q_root : int, optional
        The rank whose q counts and is broadcast; the others may pass None.
    reproducible : {"tokens", "blocks"}, optional
        The bits of out and lse are a function of the set of (key, value) that each query sees: not of the
        ranks, the layout or the order of tokens, nor of the batch, other heads, threads, scheme, executor or
        processor. "blocks": also of which 32 positions, from a multiple of 32 on, are a block, which no
        layout may tear; it costs less. device="cpu" alone. See docs/exactness.md.

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
        The same on every rank.

    Notes
    -----
    Tree Attention, arXiv 2408.04093, section 5: a partial of each rank, folded over the ranks along the
    schedule, divided on every rank.

    Examples
    --------
    >>> q = np.ones((1, 1, 4, 8), np.float32)  # of 4 heads
    >>> k = np.zeros((1, 3, 2, 8), np.float32)  # 3 tokens of this rank, 2 KV heads
    >>> v = np.arange(3, dtype=np.float32).reshape(1, 3, 1, 1) + k
    >>> out, lse = treeattn.decode(q, k, v, lengths=[2])  # the first two of them
    >>> out.shape, float(out[0, 0, 0, 0]), round(float(lse[0, 0, 0]), 4)  # a mean of 0 and 1, and ln 2
    ((1, 1, 4, 8), 0.5, 0.6931)
    """
    comm = communicators.intracomm(comm)
    name, kind = ("q", q) if q_root is None else ("k", k.k if isinstance(k, Shard) else k)

    def place() -> Device:
        return devices.find(device or arrays.device_of(name, kind), reproducible, comm.size)

    query: Any = q if q_root is None else _broadcast_query(comm, place, q, q_root)
    seen: MaskArguments = {"q_positions": q_positions, "begins": begins, "mask": mask}
    with Agreement(comm, "decode") as agreed:
        where, shard, how = place(), Shard.of(k, v, lengths), Reduction.of(scheme)
        held = where.admit(query if q_root is None else where.from_host(query), shard, scale)
        rules = Rules.of(rules, held.shape.heads)
        asked = held.shape, how, selected(how, comm, where.name), scale, where, q_root, rules, reproducible
        declared = _declared(where, held, shard, rules, reproducible, seen)
        local = LocalPlan(agreed, Request(*asked, *declared))
    with PlannedDecode(local.complete()) as decoder:
        collectively(comm, lambda: decoder.local(held.q, held.shard, **seen))
        decoder.reduce()
        return arrays.give(decoder.finish(), kind)


def _declared(
    device: Device, held: Admitted, shard: Shard, rules: Rules, reproducible: str | None, seen: MaskArguments
) -> tuple[DeclaredPositions, dict[str, str]]:
    """Where the tokens stand that are `held`, if anything asks for that; and digests of what is `seen`."""
    brought = {**seen, "draft_positions": shard.draft_positions}
    asked = reproducible == "blocks" or rules.names or shard.positions is not None
    if not asked and all(one is None for one in brought.values()):
        return DeclaredPositions(), {}
    lengths = device.host_lengths(shard.lengths)
    tables = MaskTables(rules, held.shape.batch, held.shape.queries)
    named, valid = digests(tables, held.tokens, lengths, brought)
    return DeclaredPositions(read_positions(shard.positions), valid), named


def _broadcast_query(
    comm: Communicator, place: Callable[[], Device], q: AnyArray | None, q_root: object
) -> Array:
    """The query of rank `q_root` as a NumPy array, on every rank; its problems too.

    Which rank that is must be agreed before anything is broadcast.
    """
    host: Array
    with Agreement(comm, "decode") as agreed:
        check_number("q_root", q_root, 0)
        root = operator.index(q_root)  # type: ignore[arg-type]
        if root >= comm.size:
            raise ArgumentError(f"q_root {root} is not a rank of this communicator: use 0 to {comm.size - 1}")
        agreed.must_match = {"q_root": root}
        if comm.rank == root:
            device = place()
            given = device.tensor("q", q, None)
            host = np.ascontiguousarray(device.to_host(given)).view(DTYPES[query_dtype(given)])
            agreed.share = host.shape, host.dtype.name
    shape, name = agreed.gathered[root]
    if comm.rank != root:
        host = np.empty(shape, DTYPES[name])
    comm.bcast_array(host, root)
    return host
