"""Causal attention of a prompt that is sharded over the ranks: every rank attends with its own queries.

`gather`: keys and values of all ranks come together, layer by layer, and a rank attends in one pass. `ring`:
blocks go round, a rank attends to one while the next arrives, and merges; no rank ever holds more than two.
Both mask by position (`treeattn.Rules`), so that any sharding is causal; zigzag balances the
work. What they need of memory goes with them: a prefill is closed before decode begins. Keys and values
travel by MPI, those of a GPU staged through the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from treeattn.agreement import Agreement
from treeattn.attention.mask import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs, as_runs
from treeattn.attention.shape import Shape
from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.reducer import duplicate
from treeattn.decoder.device import Device
from treeattn.llama.config import Config
from treeattn.llama.weights import Array
from treeattn.shards import parts

if TYPE_CHECKING:
    from treeattn.collectives.runtime.mpi_communicator import MpiCommunicator

#: The positions of some keys, and keys and values [keys, kv_heads, head_dim].
Block = tuple[Runs, Array, Array]


class _Gather:
    """One Allgatherv for keys and one for values; it holds one layer of the whole prompt."""

    def __init__(self, shards: Sequence[Runs], rank: int, device: Device, kv_shape: tuple[int, int]) -> None:
        arriving = np.concatenate([runs.positions() for runs in shards])
        self._device, self._order, self._row = device, np.argsort(arriving), kv_shape
        self._positions = as_runs(arriving[self._order])
        self._counts = [len(runs) * kv_shape[0] * kv_shape[1] for runs in shards]
        self._activity = watchdog.Activity("the prefill gathers keys and values")

    def blocks(self, comm: MpiCommunicator, k: Array, v: Array) -> Iterator[Block]:
        yield self._positions, self._gather(comm, k), self._gather(comm, v)

    def _gather(self, comm: MpiCommunicator, own: Array) -> Array:
        whole = np.empty((len(self._order), *self._row), np.float32)
        mine = np.ascontiguousarray(self._device.readable(own))
        with self._activity:
            comm.Allgatherv(mine, (whole, self._counts))
        gathered: Array = self._device.from_host(whole[self._order])
        return gathered


class _Ring:
    """Blocks go from rank to rank; each is attended to while the next arrives."""

    def __init__(self, shards: Sequence[Runs], rank: int, device: Device, kv_shape: tuple[int, int]) -> None:
        self._shards, self._device, size = shards, device, len(shards)
        self._before, self._after = (rank - 1) % size, (rank + 1) % size
        buffers = 2 if size > 1 else 0
        self._buffers = np.empty((buffers, 2, max(map(len, shards)), *kv_shape), np.float32)
        beside = " and ".join(f"rank {one}" for one in sorted({self._before, self._after}))
        self._activity = watchdog.Activity("the prefill's ring", f"the blocks of {beside}")

    def blocks(self, comm: MpiCommunicator, k: Array, v: Array) -> Iterator[Block]:
        if comm.size == 1:
            yield self._shards[0], k, v
            return
        held, coming = self._buffers
        held[0, : len(k)], held[1, : len(v)] = self._device.readable(k), self._device.readable(v)
        for step in range(comm.size):
            requests = []
            if step < comm.size - 1:
                requests = [comm.Irecv(coming, self._before), comm.Isend(held, self._after)]
            runs = self._shards[(comm.rank - step) % comm.size]
            if step:
                k, v = (self._device.from_host(rows[: len(runs)]) for rows in held)
            yield runs, k, v
            with self._activity:
                comm.wait_all(requests)
            held, coming = coming, held


#: By the name that the command line gives them.
PREFILLS: dict[str, type[_Gather] | type[_Ring]] = {"ring": _Ring, "gather": _Gather}


class Prefill:
    """Attention of a whole prompt, layer after layer, over a communicator of its own, so that a caller's
    messages stay the caller's. Planning, a call and closing are collective.

    method: a name of `PREFILLS`. shards: the positions of every rank's tokens. shape: of one query. Raises
    what planning raises, on every rank alike.
    """

    def __init__(
        self,
        comm: MpiCommunicator,
        method: str,
        shards: Sequence[Runs],
        shape: Shape,
        scale: float,
        device: Device,
    ) -> None:
        with Agreement(comm):  # all that a rank may have no memory for, before another waits for it
            positions = shards[comm.rank].positions()
            self._out: Array = device.memory.empty((len(positions), shape.heads, shape.head_dim), np.float32)
            self._exchange = PREFILLS[method](shards, comm.rank, device, (shape.kv_heads, shape.head_dim))
            merges = method == "ring" and comm.size > 1
            self._parts = [
                (rows, _Queries(shape, positions[rows], self._out[rows], scale, device, merges))
                for rows in parts(len(positions), device.most_queries(shape.heads, shape.kv_heads))
            ]
        self._comm = duplicate(comm, "planning the prefill")

    def __call__(self, q: Array, k: Array, v: Array) -> Array:
        """Attend in one layer, with q [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim] of this
        rank's tokens, to all tokens up to each one's own: an array like q, of the next call too."""
        for number, (positions, keys, values) in enumerate(self._exchange.blocks(self._comm, k, v)):
            for rows, queries in self._parts if len(positions) else ():
                queries.attend(q[rows], keys, values, positions, merge=number > 0)
        for _, queries in self._parts:
            queries.finish()
        return self._out

    def __enter__(self) -> Prefill:
        return self

    def __exit__(self, *exception: object) -> None:
        """Give the communicator back; not after an exception, when other ranks may wait elsewhere."""
        if exception[0] is None:
            self._comm.Free()


class _Queries:
    """Attention of queries at some positions to blocks of keys, one after the other."""

    def __init__(
        self,
        shape: Shape,
        positions: NDArray[np.int64],
        out: Array,
        scale: float,
        device: Device,
        merges: bool,
    ) -> None:
        shape = replace(shape, queries=len(positions))
        self._memory, empty = device.memory, device.memory.empty
        self._positions, self._tables = positions, MaskTables(Rules(causal=True), 1, shape.queries)
        self._records = empty((*shape.lse_shape, shape.head_dim + 2), np.float32)
        self._attention = device.attention(shape, self._records, scale, self._tables)
        self.finish = device.finish(self._records, out[None], empty(shape.lse_shape, np.float32))
        if merges:
            self._before = empty(self._records.shape, np.float32)
            operator = device.merge_operator(shape.head_dim, np.dtype(np.float32))
            flat = (array.reshape(-1, operator.width) for array in (self._records, self._before))
            self._merge = operator.planned_merge(*flat)

    def attend(self, q: Array, k: Array, v: Array, positions: Runs, merge: bool) -> None:
        """Write records of q over k, v at `positions`, merged with those of the blocks before."""
        if merge:
            self._memory.copy(self._before, self._records)
        self._tables.update(positions, len(k), None, self._positions)
        self._attention(q[None], k[None], v[None], None)
        if merge:
            self._merge()


def ring_floats(config: Config, head_dim: int, ranks: int) -> int:
    """How many numbers a rank holds for a token of its own while a ring runs the prompt, beside its cache: x,
    q, k and v, what they attend to, the records; with other ranks the records so far, and two blocks of keys
    and values. head_dim: of the kernels (`Llama.cache_head_dim`)."""
    records, kv = config.heads * (head_dim + 2), config.kv_heads * head_dim
    own = config.hidden_size + 2 * (config.heads * head_dim + kv)
    return own + records + (records + 4 * kv if ranks > 1 else 0)
