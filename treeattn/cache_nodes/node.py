"""A cache node: keeps its share of keys and values, attends to it, and does what the model process says."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from treeattn import communicators
from treeattn.agreement import collectively
from treeattn.cache import ShardedCache
from treeattn.cache_nodes import memory
from treeattn.cache_nodes.meeting import agreed_capacity, agreed_index, meet
from treeattn.cache_nodes.message import Head, Kind, Message
from treeattn.cache_nodes.view import Attention, CachePlan, View
from treeattn.errors import ArgumentError, TreeattnError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["serve"]


def serve(comm: Intracomm | None = None, *, memory_bytes: int | None = None) -> Node:
    """Be a cache node until the model process, rank 0, ends it. Every rank but 0 calls, as rank 0 `connect`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        As of `connect`.
    memory_bytes : int, optional
        What keys and values may take here; nine tenths of what is free, shared with the other nodes of this
        machine, unless given.
    """
    watched = communicators.mpi_intracomm(comm, "a cache node")
    if watched.rank == 0:
        raise ArgumentError(
            "a cache node is none of rank 0, where the model runs: mpiexec -n 1 python model.py : -n "
            f"{max(watched.size - 1, 16)} treeattn cache-node"
        )
    node = Node(watched, memory_bytes)
    while node.serves:
        node.take()
    return node


class _Held:
    """A cache of this node, and how its steps attend."""

    def __init__(self, cache: ShardedCache) -> None:
        self.layers = cache.layers
        self.views: list[tuple[View, Attention]] = []


class Node:
    """What a node has and does. command: whether rank 0 is a command of this package, which leaves together
    with the others."""

    def __init__(self, comm: Any, memory_bytes: int | None) -> None:
        """Collective, as making `CacheNodes` is."""
        self._comm = comm
        scheme, self.command = comm.bcast(None)
        self.tree = meet(comm, scheme)
        self._nodes = comm.Split(1, comm.rank)
        here = next(group for group in comm.nodes if comm.rank in group)
        sharing = len(set(here) - {0})
        self._free = memory.available(sharing) if memory_bytes is None else memory_bytes
        self._message = Message()
        self.caches: list[_Held] = []
        self.serves, self.steps = True, 0

    def take(self) -> None:
        """Do what the next message says."""
        self.tree.receive(self._message)
        head = self._message.head
        if head.kind == Kind.STEP:
            self._step(head)
            return
        name, arguments = self._message.called()
        with contextlib.suppress(TreeattnError):  # all ranks raised it: the model process knows
            getattr(self, f"_{name}")(**arguments)

    def _step(self, head: Head) -> None:
        held = self.caches[head.cache]
        view, attention = held.views[head.view]
        flags = head.counts, head.begins
        key = head.cache, head.view, head.tokens, *flags
        parts = iter(self._message.arrays(key, view.parts(head.tokens, *flags)))
        counts, begins = (next(parts) if flag else None for flag in flags)
        q, *new = parts
        layer = held.layers[head.layer]
        first = layer.totals - (view.queries - head.tokens)
        if new:
            layer.append(new[0], new[1], counts)
        lengths = layer.lengths
        most = int(lengths.max())
        some = lengths if (lengths != most).any() else None
        attention(q, layer.k[:, :most], layer.v[:, :most], some, layer.positions, first, begins)
        self.steps += 1

    def _plan_cache(self, plan: CachePlan, batch: int, capacity: int | None) -> None:
        found = agreed_capacity(self._comm, plan, batch, capacity, self._free)

        def make() -> ShardedCache:
            return ShardedCache(
                self._nodes,
                batch=batch,
                capacity=found,
                kv_heads=plan.kv_heads,
                head_dim=plan.head_dim,
                v_dim=plan.v_dim,
                dtype=plan.dtype,
                layers=plan.layers,
            )

        self._hold(collectively(self._comm, make), plan.token_bytes(batch), found)

    def _load(self, directory: str, capacity: int | None) -> None:
        plan, index = agreed_index(self._comm, directory)
        batch, wanted = len(index.totals), index.capacity if capacity is None else capacity
        found = agreed_capacity(self._comm, plan, batch, wanted, self._free)
        cache = collectively(self._comm, lambda: ShardedCache.load(directory, self._nodes, capacity=found))
        self._hold(cache, plan.token_bytes(batch), found)

    def _hold(self, cache: ShardedCache, token_bytes: int, capacity: int) -> None:
        self._free -= token_bytes * -(-capacity // self._nodes.size)
        self.caches.append(_Held(cache))

    def _save(self, cache: int, directory: str, about: dict[str, Any]) -> None:
        collectively(self._comm, lambda: self.caches[cache].layers[0].save(directory, about))

    def _plan_view(self, cache: int, view: View) -> None:
        attention = Attention(view, self._comm, self.tree.schedule)
        self.caches[cache].views.append((view, attention))

    def _rollback(self, cache: int, totals: Any) -> None:
        for layer in self.caches[cache].layers:
            layer.rollback(totals)

    def _select(self, cache: int, rows: Any) -> None:
        for layer in self.caches[cache].layers:
            layer.select(rows)

    def _close(self) -> None:
        for held in self.caches:
            for _, attention in held.views:
                attention.close()
        self.tree.close()
        self._nodes.free()
        self.serves = False
