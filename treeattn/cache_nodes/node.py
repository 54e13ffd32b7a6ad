"""A cache node: keeps its share of keys and values, attends to it, and does what the model process says."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from treeattn.attention.arguments import Rules
from treeattn.attention.shape import CACHE_DTYPES, DTYPES
from treeattn.cache import ShardedCache, saved
from treeattn.cache_nodes.message import LayerStep, array_of, decode
from treeattn.cache_nodes.tree import meet
from treeattn.cache_nodes.view import CachePlan, View, ViewAttention
from treeattn.errors import ArgumentError, TransportError, TreeattnError
from treeattn.mpi import communicators, job
from treeattn.mpi.communicators import MpiCommunicator, collectively, exchange

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from treeattn.cache.sharded import CacheLayer


def serve(comm: Intracomm | None = None) -> Node:
    """Be a cache node until the model process, rank 0, ends it. Every rank but 0 calls, as rank 0 `connect`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        As of `connect`.
    """
    watched = communicators.mpi_intracomm(comm, "a cache node")
    if watched.rank == 0:
        raise ArgumentError(
            "a cache node is none of rank 0, where the model runs: mpiexec -n 1 python model.py : -n "
            f"{max(watched.size - 1, 16)} treeattn cache-node"
        )
    node = Node(watched)
    while node.serves:
        node.take()
    return node


#: What the model process has nodes do besides steps: methods of `Node`.
_CALLS = ("plan_cache", "load", "save", "plan_view", "rollback", "select", "drop", "close")


class NodeCache:
    """A cache of this node, and how its steps attend."""

    def __init__(self, plan: CachePlan, cache: ShardedCache | None) -> None:
        self.plan, self.cache = plan, cache
        self.layers = cache.layers if cache else ()
        self.views: list[tuple[View, ViewAttention]] = []

    def close(self) -> None:
        """Collective over all processes."""
        for _, attention in self.views:
            attention.close()


class Node:
    """What a node has and does. command: whether rank 0 is a command of this package, which leaves together
    with the others."""

    def __init__(self, comm: MpiCommunicator) -> None:
        """Collective, as making `CacheNodes` is."""
        self._comm = comm
        scheme, self.command = exchange(comm, "connect and serve", None, job.commanded())[0]
        self.tree = meet(comm, scheme)
        self._nodes = cast("Intracomm", comm.Split(1, comm.rank))
        self.caches: list[NodeCache] = []
        self.serves, self.steps = True, 0

    def take(self) -> None:
        """Do what the next message says."""
        message = decode(self.tree.receive())
        if isinstance(message, LayerStep):
            self._step(message)
            return
        if message.name not in _CALLS:
            raise TransportError(
                f"a message to cache nodes calls {message.name!r:.60}: there is no such call"
            )
        with contextlib.suppress(TreeattnError):  # all ranks raised it: the model process knows
            getattr(self, f"_{message.name}")(**message.arguments)

    def _step(self, step: LayerStep) -> None:
        held = self.caches[step.cache]
        layer, plan, self.steps = held.layers[step.layer], held.plan, self.steps + 1
        if step.view is None:
            _append(layer, plan, step, step.arrays)
            return
        view, attention = held.views[step.view]
        batch, first = len(layer.totals), layer.totals - (view.queries - step.tokens)
        q = array_of(step.arrays[0], (batch, view.queries, view.heads, plan.head_dim), DTYPES[plan.q_dtype])
        _append(layer, plan, step, step.arrays[1:])
        lengths = layer.lengths
        most = int(lengths.max())
        some = lengths if (lengths != most).any() else None
        k = layer.k[:, :most]
        v = k[..., : plan.v_dim] if layer.v is None else layer.v[:, :most]
        begins = None if step.begins is None else np.array(step.begins)
        attention(q, k, v, some, layer.positions, first, begins)

    def _plan_cache(self, plan: dict[str, Any], batch: int, capacity: int) -> None:
        def make() -> ShardedCache:
            return ShardedCache(self._nodes, batch=batch, capacity=capacity, **plan)

        self.caches.append(NodeCache(CachePlan(**plan), collectively(self._comm, make)))

    def _load(self, directory: str, capacity: int | None) -> None:
        plan = CachePlan.of(saved.agree(self._comm, Path(directory)))
        cache = collectively(self._comm, lambda: ShardedCache.load(directory, self._nodes, capacity=capacity))
        self.caches.append(NodeCache(plan, cache))

    def _save(self, cache: int, directory: str, about: dict[str, Any]) -> None:
        held = self.caches[cache].cache
        assert held is not None
        collectively(self._comm, lambda: held.save(directory, about))

    def _plan_view(self, cache: int, rules: dict[str, Any], **view: Any) -> None:
        held = self.caches[cache]
        planned = View(held.plan, rules=Rules(**rules), **view)
        held.views.append((planned, ViewAttention(planned, self._comm, self.tree.schedule)))

    def _rollback(self, cache: int, totals: list[int]) -> None:
        for layer in self.caches[cache].layers:
            layer.rollback(totals)

    def _select(self, cache: int, rows: list[int]) -> None:
        for layer in self.caches[cache].layers:
            layer.select(rows)

    def _drop(self, cache: int) -> None:
        held = self.caches[cache]
        held.close()
        self.caches[cache] = NodeCache(held.plan, None)

    def _close(self) -> None:
        for held in self.caches:
            held.close()
        self.tree.close()
        self._nodes.free()
        self.serves = False


def _append(layer: CacheLayer, plan: CachePlan, step: LayerStep, arrays: list[memoryview]) -> None:
    """The new tokens of a step, if it brings any."""
    if arrays:
        dtype, rows = CACHE_DTYPES[plan.dtype], (len(layer.totals), step.tokens, plan.kv_heads)
        k, *v = (array_of(one, (*rows, width), dtype) for one, width in zip(arrays, plan.widths, strict=True))
        layer.append(k, v[0] if v else None, step.counts)
