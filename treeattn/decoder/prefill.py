"""Attention of many queries that are sharded as the keys are: every rank attends with its own tokens.

Blocks of keys and values go round, a rank attends to one while the next arrives, and merges; no rank ever
holds more than two. Masks are by position, so that any sharding is causal; zigzag balances the work. Between
GPUs keys and values travel by NCCL, or, where ranks do not meet by it, through the hosts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn.attention import arrays
from treeattn.attention.arguments import Rules, read_positions
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs
from treeattn.attention.shape import DTYPES, Shape, bits_of, check_number, query_dtype
from treeattn.backends.device import Device, find
from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.communicator import Communicator, Given
from treeattn.collectives.runtime.memory import StreamOrder
from treeattn.collectives.runtime.reducer import Owner
from treeattn.decoder.mask_plan import DeclaredPositions, agreed_runs, check_blocks
from treeattn.decoder.plan import sinks
from treeattn.decoder.request import refuse, telling_arguments
from treeattn.errors import ArgumentError, PeerTimeoutError, StateError
from treeattn.mpi import communicators
from treeattn.mpi.communicators import Agreement
from treeattn.partial import Array
from treeattn.shards import parts

if TYPE_CHECKING:
    from treeattn.collectives.runtime.nccl import NcclCommunicator

CAUSAL = Rules(causal=True)

#: Another kernel's attention of a block: called with q, k and v as the device has them; whether each query
#: sees one key more than the one before it, and the last one all, or each sees all; and the records to write,
#: [batch, heads, queries, v's width + 2], of which the first see nothing where there are more than queries.
BlockKernel = Callable[[Array, Array, Array, bool, Array], object]

#: The positions of some keys, and keys and values [batch, keys, kv_heads, width].
Block = tuple[Runs, Array, Array]


@telling_arguments
def prefill(
    q: Array,
    k: Array,
    v: Array,
    *,
    positions: Array | None = None,
    comm: Given = None,
    scale: float | None = None,
    rules: Rules = CAUSAL,
    begins: Array | None = None,
    device: str | None = None,
    reproducible: str | None = None,
) -> tuple[Array, Array]:
    """Exact attention of the queries of a prompt whose tokens every rank holds some of. Collective.

    Plans, runs and tears down: for layer after layer keep a `Prefill`. Arrays are of any library, as for
    `decode`.

    Parameters
    ----------
    q : [batch, tokens, heads, head_dim]
        Of this rank's tokens, which may be none.
    k, v : [batch, tokens, kv_heads, head_dim]
        Of the same tokens; v may have another width.
    positions : optional
        Of these tokens in the whole sequence, as in a `Shard`; the ranks' blocks follow one another unless
        given.
    comm : mpi4py.MPI.Intracomm or torch.distributed.ProcessGroup, optional
        The ranks; COMM_WORLD unless given.
    scale, begins
        As for `decode`.
    rules : Rules
        What a query may attend to; causal unless given.
    device : {"cpu", "cuda"}, optional
        Where to compute: where q lies unless given.
    reproducible : {"tokens", "blocks"}, optional
        As for `decode`: the bits of a query then depend on the tokens that it sees and on nothing else.

    Returns
    -------
    out : [batch, tokens, heads, v's width]
        Of this rank's queries; float32 (float64 for float64 inputs), in the container of q.
    lse : [batch, heads, tokens]

    Raises
    ------
    ArgumentError, RestrictionError, BackendError
        The same on every rank: arrays that do not fit each other, two ranks that claim a position, ranks that
        pass different things.

    Examples
    --------
    >>> q, k = np.ones((1, 3, 4, 8), np.float32), np.zeros((1, 3, 2, 8), np.float32)
    >>> out, lse = treeattn.prefill(q, k, k)  # causal: of 1, 2 and 3 keys
    >>> np.exp(lse[0, 0]).round(3).tolist()
    [1.0, 2.0, 3.0]
    """
    comm = communicators.intracomm(comm)
    with Agreement(comm, "prefill"):
        place = find(device or arrays.device_of("q", q), reproducible, comm.size)
        seen = {name: place.view(name, array) for name, array in (("q", q), ("k", k), ("v", v))}
        bits = {name: "bfloat16" if one.dtype == np.uint16 else None for name, one in seen.items()}
        given = [place.tensor(name, one, bits[name]) for name, one in seen.items()]
        for name, array in zip("qkv", given, strict=True):
            if array.shape[:2] != given[0].shape[:2] or array.dtype != given[0].dtype:
                raise ArgumentError(
                    f"{name} is {array.dtype} {list(array.shape)}, and q {given[0].dtype} "
                    f"{list(given[0].shape)}: q, k and v are of one type and of the same tokens"
                )
        batch, tokens, heads, head_dim = given[0].shape
        kv_heads, width = given[1].shape[2:]
        if width != head_dim:
            raise ArgumentError(f"k has heads of {width}, q of {head_dim}: they must be the same")
        shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "batch": batch}
        shape |= {"dtype": query_dtype(given[0]), "v_dim": given[2].shape[3]}
    settings: dict[str, Any] = {"positions": positions, "scale": scale, "rules": rules}
    settings |= {"device": place.name, "reproducible": reproducible}
    with Prefill(comm, tokens=tokens, **shape, **settings) as planned:
        return arrays.give(planned(*given, begins=begins), q)


class _Ring:
    """Blocks [batch, tokens, kv_heads, width] go from rank to rank: from the host, and each is attended to
    while the next arrives; or by NCCL, queued to the GPU."""

    def __init__(
        self, shards: Sequence[Runs], rank: int, device: Device, shape: Shape, nccl: NcclCommunicator | None
    ) -> None:
        size = len(shards)
        self.shards, self.rank, self.device, self._nccl = shards, rank, device, nccl
        self._elements = DTYPES[shape.dtype]
        self._rows = [(shape.batch, shape.kv_heads, width) for width in (shape.head_dim, shape.v_dim)]
        self._before, self._after = (rank - 1) % size, (rank + 1) % size
        most = max(map(len, shards)) if size > 1 else 0
        self._buffers = self.empty(most), self.empty(most)
        beside = " and ".join(f"rank {one}" for one in sorted({self._before, self._after}))
        self.waits_for = "the prefill's ring", f"the blocks of {beside}"
        self._activity = watchdog.Activity(*self.waits_for)

    def count(self, tokens: int) -> list[int]:
        """Elements of k and of v, of so many tokens."""
        return [batch * heads * width * tokens for batch, heads, width in self._rows]

    def packed(self, k: Array, v: Array, into: Array) -> None:
        """Copy both, one after the other, into a flat array of elements."""
        middle, end = np.cumsum(self.count(k.shape[1]))
        for part, array in ((into[:middle], k), (into[middle:end], v)):
            rows = self.device.readable(array) if self._nccl is None else array
            part.reshape(rows.shape)[...] = rows.view(part.dtype)

    def unpacked(self, flat: Array, tokens: int) -> list[Array]:
        middle, end = np.cumsum(self.count(tokens))
        return [
            part.reshape(batch, tokens, heads, width)
            for part, (batch, heads, width) in zip((flat[:middle], flat[middle:end]), self._rows, strict=True)
        ]

    def empty(self, tokens: int) -> Array:
        """Room for both, of so many tokens: flat, of words that every communicator can send."""
        empty: Callable[..., Array] = np.empty if self._nccl is None else self.device.memory.empty
        return empty((sum(self.count(tokens)),), f"u{self._elements.itemsize}")

    def arrived(self, rows: Array) -> Array:
        """Rows of words as the device's."""
        if self._nccl is not None:
            made: Array = rows.view(bits_of(self._elements.name) or self._elements)
            return made
        return self.device.from_host(np.ascontiguousarray(rows).view(self._elements))

    def blocks(self, comm: Any, k: Array, v: Array) -> Iterator[Block]:
        """The blocks of a layer: this rank's first, then those of the ranks before it."""
        size = len(self.shards)
        if size == 1:
            yield self.shards[0], k, v
            return
        held, coming = self._buffers
        self.packed(k, v, held)
        for step in range(size):
            runs, following = (self.shards[(self.rank - step - n) % size] for n in (0, 1))
            wait: Callable[[], object] = tuple
            if step < size - 1:
                ends = [sum(self.count(len(one))) for one in (following, runs)]
                into, out = coming[: ends[0]], held[: ends[1]]
                if self._nccl is None:
                    wait = comm.exchange((into, self._before), (out, self._after))
                else:
                    words = into.view(np.float32), out.view(np.float32)  # heads are multiples of 8
                    self._nccl.exchange([(words[0], self._before)], [(words[1], self._after)])
            if step:
                k, v = map(self.arrived, self.unpacked(held, len(runs)))
            yield runs, k, v
            with self._activity:
                wait()
            held, coming = coming, held


class Prefill:
    """A planned `prefill`: attention of a whole prompt, layer after layer, over a communicator of its own.
    Planning, a call and closing are collective.

    Parameters
    ----------
    comm, positions, scale, rules, reproducible
        As for `prefill`.
    tokens : int
        How many this rank holds; 0 is right.
    heads, kv_heads, head_dim, batch, dtype, device
        As for a `Decoder`; of q, k and v alike.
    v_dim : int, optional
        Channels of the values; head_dim unless given.

    Raises
    ------
    ArgumentError, RestrictionError, BackendError
        The same on every rank.

    Examples
    --------
    >>> q, k = np.ones((1, 3, 4, 8), np.float32), np.zeros((1, 3, 2, 8), np.float32)
    >>> with treeattn.Prefill(tokens=3, heads=4, kv_heads=2, head_dim=8, dtype="float32") as attention:
    ...     layers = [attention(q, k, k) for layer in range(2)]
    >>> layers[1][0].shape
    (1, 3, 4, 8)
    """

    #: For blocks without another mask than causality: whoever sets it plans with no other rules, passes no
    #: begins, and asks for no reproducible bits.
    block_kernel: BlockKernel | None = None

    def __init__(
        self,
        comm: Given = None,
        *,
        tokens: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        positions: Array | None = None,
        batch: int = 1,
        dtype: str = "bfloat16",
        v_dim: int | None = None,
        scale: float | None = None,
        rules: Rules = CAUSAL,
        device: str = "cpu",
        reproducible: str | None = None,
    ) -> None:
        comm = communicators.intracomm(comm)
        with Agreement(comm, "Prefill") as agreed:
            check_number("tokens", tokens, 0)
            shape = Shape(batch, 1, heads, kv_heads, head_dim, dtype, v_dim=v_dim or 0)
            rules, factor = Rules.of(rules, heads), shape.logit_scale(scale)
            declared = DeclaredPositions(read_positions(positions), (tokens,))
            place = find(device, reproducible, comm.size)
            place.check_shape(shape)
            refuse({"reproducible": reproducible, "float64": dtype == "float64"})
            agreed.must_match = {
                "the shape or dtype of q, k, v": shape,
                "scale": factor,
                "rules": rules,
                "device": place.name,
                "reproducible": reproducible,
                "the layout of positions": declared.layout,
            }
            agreed.share = declared
        shards = agreed_runs(agreed.gathered)
        assert shards is not None
        self._nccl = _between_gpus(comm, place) if place.name == "cuda" and comm.size > 1 else None
        with contextlib.ExitStack() as refused:
            refused.callback(self._leave)
            with Agreement(comm):  # all that a rank may have no memory for, before another waits for it
                self._shape, self._device, self._in_order = shape, place, StreamOrder(place.stream)
                self._ring = _Ring(shards, comm.rank, place, shape, self._nccl)
                stands = shards[comm.rank].positions()
                if reproducible == "blocks":
                    check_blocks(shards[comm.rank], comm.size)
                self._parts = [
                    (rows, _Queries(shape, stands[rows], factor, place, comm.size > 1, rules))
                    for rows in parts(tokens, place.most_queries(heads, kv_heads))
                ]
                self._results = self._whole(tokens)
                self._containers = arrays.Containers(place.view, self._results)
            refused.pop_all()
        with watchdog.Activity("planning the prefill"):
            self._comm: Communicator | None = comm.dup()
            self._owner = Owner("this prefill")

    def _whole(self, tokens: int) -> tuple[Array, Array]:
        """(out, lse): of the one part, or of several together."""
        if len(self._parts) == 1:
            return self._parts[0][1].results
        shape = replace(self._shape, queries=1)
        empty, dtype = self._device.memory.empty, shape.record_dtype
        out = empty((shape.batch, tokens, shape.heads, shape.v_dim), dtype)
        return out, empty((shape.batch, shape.heads, tokens), dtype)

    def __call__(self, q: Array, k: Array, v: Array, *, begins: Array | None = None) -> tuple[Array, Array]:
        """Attend in one layer: (out, lse) as `prefill` gives them, which hold until the next call. Arrays are
        looked at on their own rank alone; raises `ArgumentError` there, and `StateError` after `close`."""
        self._owner.take()
        if self._comm is None:
            raise StateError("a step on a prefill that is closed")
        q, k, v = self._containers.take(q, k, v)
        tokens = self._results[0].shape[1]
        self._check(tokens, q, k, v)
        self._in_order()
        for number, (runs, keys, values) in enumerate(self._ring.blocks(self._comm, k, v)):
            for rows, queries in self._parts if len(runs) else ():
                queries.attend(q[:, rows], keys, values, runs, begins, number > 0, self.block_kernel)
        for rows, queries in self._parts:
            queries.finish()
            if len(self._parts) > 1:
                self._device.memory.copy(self._results[0][:, rows], queries.results[0])
                self._device.memory.copy(self._results[1][..., rows], queries.results[1])
        return self._containers.give()

    def _check(self, tokens: int, q: Array, k: Array, v: Array) -> None:
        """Raise `ArgumentError` unless q, k and v are of the planned tokens, which may be none."""
        shape = self._shape
        if tokens:
            self._device.check(replace(shape, queries=tokens), q, k, v, None)
        heads = (shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.v_dim)
        for name, array, rows in zip("qkv", (q, k, v), heads, strict=True):
            if array.shape != (shape.batch, tokens, *rows):
                raise ArgumentError(
                    f"{name} has shape {list(array.shape)}, expected {[shape.batch, tokens, *rows]}: this "
                    f"rank is planned with tokens={tokens}"
                )

    def close(self) -> None:
        """Give the communicator back. Collective; a second call does nothing."""
        self._owner.check()
        if self._comm is not None:
            stream, seconds = self._device.stream, watchdog.limit()
            for wait in (stream.synchronize_all, self._nccl.close) if stream and self._nccl else ():
                if not watchdog.call_with_timeout(seconds, wait):
                    self._leave()
                    raise PeerTimeoutError(watchdog.timeout_message(*self._ring.waits_for, seconds))
            self._comm.free()
            self._comm = None

    def _leave(self) -> None:
        """Without the others, who may wait elsewhere."""
        if self._nccl is not None:
            watchdog.call_with_timeout(10, self._nccl.abort)  # it waits for graphs

    def __enter__(self) -> Prefill:
        return self

    def __exit__(self, *exception: object) -> None:
        """Not after an exception, when other ranks may wait elsewhere."""
        if exception[0] is None:
            self.close()
        else:
            self._leave()


def _between_gpus(comm: Communicator, device: Any) -> NcclCommunicator | None:
    """NCCL, or None where blocks go through the hosts, which rank 0 says. Collective."""
    from treeattn.decoder import gpu_reducers

    problem = gpu_reducers.problem("nccl", comm, device.memory)
    if comm.rank == 0:
        way = f"the memory of the hosts: {problem}" if problem else "NCCL"
        gpu_reducers.say(f"blocks of prompts travel by {way}")
    return None if problem else gpu_reducers.connected_by_nccl(comm, device.memory)


class _Queries:
    """Attention of queries at some positions to blocks of keys, one after the other. results: (out, lse)."""

    def __init__(
        self, shape: Shape, positions: Array, scale: float, device: Device, merges: bool, rules: Rules
    ) -> None:
        shape = replace(shape, queries=len(positions))
        memory, dtype = device.memory, shape.record_dtype
        self._copy, self._positions = memory.copy, np.broadcast_to(positions, (shape.batch, len(positions)))
        self._tables = MaskTables(rules, shape.batch, shape.queries)
        operator = device.merge_operator(shape.v_dim, dtype)
        self._records = memory.empty((*shape.lse_shape, operator.width), operator.dtype)
        self._attention = device.attention(shape, self._records, scale, self._tables)
        out = memory.empty((shape.batch, shape.queries, shape.heads, shape.v_dim), dtype)
        self.results = out, memory.empty(shape.lse_shape, dtype)
        self._finish = device.finish(self._records, *self.results)
        self._add_sinks = sinks(rules, device, self._records, operator)
        self._merge: Callable[[], object] | None = None
        if merges:
            self._before = memory.empty(self._records.shape, operator.dtype)
            flat = (array.reshape(-1, operator.width) for array in (self._records, self._before))
            self._merge = operator.planned_merge(*flat)

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        positions: Runs,
        begins: Array | None,
        merge: bool,
        kernel: BlockKernel | None,
    ) -> None:
        """Write records of q over k, v at `positions`, merged with those of the blocks before."""
        plain = kernel and _plain(positions.all_below(self._positions[0] + 1))
        if merge and plain and not plain[1]:
            return
        if merge:
            self._copy(self._before, self._records)
        if kernel and plain:
            unseeing, keys, causal = plain
            kernel(q[:, unseeing:], k[:, :keys], v[:, :keys], causal, self._records)
        else:
            self._tables.update(positions, len(positions), None, self._positions, begins=begins)
            self._attention(q, k, v, None)
        if self._merge is not None and merge:
            self._merge()

    def finish(self) -> None:
        if self._add_sinks is not None:
            self._add_sinks()
        self._finish()


def _plain(seen: Array) -> tuple[int, int, bool] | None:
    """(unseeing, keys, causal) where the first `unseeing` queries see nothing and the others all of so many
    keys, or, if `causal`, one more each up to all of them; else None. seen: how many keys each query sees."""
    unseeing = int(np.count_nonzero(seen == 0))
    seen = seen[unseeing:]
    keys = int(seen[-1]) if len(seen) else 0
    if not keys or seen[0] == keys:
        return unseeing, keys, False
    return (unseeing, keys, True) if (np.diff(seen) == 1).all() else None
