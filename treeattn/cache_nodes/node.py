"""A cache node: keeps its share of keys and values, attends to it, and does what the model process says."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from treeattn.attention.arguments import Rules
from treeattn.attention.shape import DTYPES, Shape
from treeattn.cache import ShardedCache, saved
from treeattn.cache_nodes.message import LayerStep, array_of, decode
from treeattn.cache_nodes.tree import meet
from treeattn.cache_nodes.view import View, ViewAttention
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

    def __init__(self, cache: ShardedCache) -> None:
        self.layers: tuple[CacheLayer, ...] = cache.layers
        self.views: list[ViewAttention] = []

    def close(self) -> None:
        """Collective over all processes."""
        for attention in self.views:
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
        layer, self.steps = held.layers[step.layer], self.steps + 1
        if step.view is None:
            _append(layer, step, step.arrays)
            return
        attention = held.views[step.view]
        shape, first = attention.shape, layer.totals - (attention.shape.queries - step.tokens)
        q = array_of(step.arrays[0], shape.q_shape, DTYPES[shape.dtype])
        _append(layer, step, step.arrays[1:])
        lengths = layer.lengths
        most = int(lengths.max())
        some = lengths if (lengths != most).any() else None
        k = layer.k[:, :most]
        v = k[..., : shape.v_dim] if layer.v is None else layer.v[:, :most]
        begins = None if step.begins is None else np.array(step.begins)
        attention(q, k, v, some, layer.positions, first, begins)

    def _plan_cache(self, plan: dict[str, Any], batch: int, capacity: int) -> None:
        def make() -> ShardedCache:
            return ShardedCache(self._nodes, batch=batch, capacity=capacity, **plan)

        self.caches.append(NodeCache(collectively(self._comm, make)))

    def _load(self, directory: str, capacity: int | None) -> None:
        saved.agree(self._comm, Path(directory))
        cache = collectively(self._comm, lambda: ShardedCache.load(directory, self._nodes, capacity=capacity))
        self.caches.append(NodeCache(cache))

    def _save(self, cache: int, directory: str, about: dict[str, Any]) -> None:
        first = cast(ShardedCache, self.caches[cache].layers[0])
        collectively(self._comm, lambda: first.save(directory, about))

    def _plan_view(self, cache: int, view: tuple[Any, ...]) -> None:
        shape, scale, rules = view
        planned = View(Shape(**shape), scale, Rules(**rules))
        self.caches[cache].views.append(ViewAttention(planned, self._comm, self.tree.schedule))

    def _rollback(self, cache: int, totals: list[int]) -> None:
        for layer in self.caches[cache].layers:
            layer.rollback(totals)

    def _select(self, cache: int, rows: list[int]) -> None:
        for layer in self.caches[cache].layers:
            layer.select(rows)

    def _drop(self, cache: int) -> None:
        held = self.caches[cache]
        held.close()
        held.layers, held.views = (), []

    def _close(self) -> None:
        for held in self.caches:
            held.close()
        self.tree.close()
        self._nodes.Free()
        self.serves = False


def _append(layer: CacheLayer, step: LayerStep, arrays: list[memoryview]) -> None:
    """The new tokens of a step, if it brings any."""
    if arrays:
        rows = len(layer.totals), step.tokens
        pairs = zip(arrays, layer.arrays, strict=True)
        k, *v = (array_of(one, (*rows, *held.shape[2:]), held.dtype) for one, held in pairs)
        layer.append(k, v[0] if v else None, step.counts)
