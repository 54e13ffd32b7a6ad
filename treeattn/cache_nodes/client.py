"""The model process: it meets the cache nodes, plans caches on them, and ends them."""

from __future__ import annotations

import atexit
import functools
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from numpy.typing import ArrayLike, DTypeLike

from treeattn.attention.arguments import CacheFormat
from treeattn.attention.shape import check_latent, dtype_word
from treeattn.cache import saved
from treeattn.cache_nodes.remote_cache import RemoteCache
from treeattn.cache_nodes.tree import NodeLink
from treeattn.cache_nodes.view import CachePlan, ViewAttention
from treeattn.collectives.schedule import Schedule
from treeattn.errors import ArgumentError, PeerError, StateError
from treeattn.mpi import communicators, job
from treeattn.mpi.communicators import MpiCommunicator

if TYPE_CHECKING:
    from types import TracebackType

    from mpi4py.MPI import Intracomm

_open: list[CacheNodes] = []  # the one of this process


def connect(comm: Intracomm | None = None, *, scheme: str | Schedule | None = None) -> CacheNodes:
    """Meet the cache nodes: all other ranks, which wait in `serve`. Rank 0 calls, before it loads a model.

    Nodes that it has met already, and did not close, are given again.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        The model process, rank 0, and the nodes; COMM_WORLD unless given.
    scheme : str or Schedule, optional
        The tree: partials come up it, and messages go down; `hierarchical` unless given.

    Raises
    ------
    ArgumentError
        No nodes, or another rank than 0.
    StateError
        Nodes that were started as ``treeattn cache-node``, and closed.
    ScheduleError, RestrictionError
        A scheme that is no tree.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> from treeattn import cache_nodes
    >>> if MPI.COMM_WORLD.rank:  # as `treeattn cache-node` does
    ...     node = cache_nodes.serve()
    ... else:
    ...     with cache_nodes.connect() as nodes:
    ...         assert nodes.size == MPI.COMM_WORLD.size - 1
    """
    watched = communicators.mpi_intracomm(comm, "a job with cache nodes")
    if watched.rank:
        raise ArgumentError(
            f"this is rank {watched.rank}: the model process is rank 0, the others run `treeattn cache-node`"
        )
    if watched.size == 1:
        raise ArgumentError(
            "there are no cache nodes: mpiexec -n 1 python model.py : -n 16 treeattn cache-node, with both "
            "parts in one job"
        )
    for known in _open:
        if known._link.comm is watched and not known._link.closed:
            return known
        if known._link.leave and known._link.closed:
            raise StateError(
                "the cache nodes have ended with nodes.close(): connect() once, and plan several caches there"
            )
    if not _open:
        sys.excepthook = functools.partial(_uncaught, sys.excepthook)
    _open[:] = [CacheNodes(watched, scheme)]
    return _open[0]


class CacheNodes:
    """The cache nodes of a job. `size` is their number; a context manager, which ends them.

    messages, bytes: how many messages this process has sent to the nodes below it, and their bytes.
    """

    def __init__(self, comm: MpiCommunicator, scheme: str | Schedule | None) -> None:
        """Collective, as `serve` is."""
        self._link, self.size = NodeLink(comm, scheme), comm.size - 1
        self._planned: list[list[ViewAttention]] = []  # of each cache
        self._dropped: list[int] = []  # caches that nobody has any more
        atexit.register(self._exit)

    @property
    def messages(self) -> int:
        """How many messages this process has sent to the nodes below it."""
        return self._link.tree.messages

    @property
    def bytes(self) -> int:
        return self._link.tree.bytes

    def cache(
        self,
        *,
        layers: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        v_dim: int | None = None,
        batch: int = 1,
        latent: bool = False,
        dtype: DTypeLike = "bfloat16",
        k_scale: ArrayLike | None = None,
        v_scale: ArrayLike | None = None,
    ) -> RemoteCache:
        """Plan a cache on the nodes; there may be several.

        Parameters
        ----------
        layers, kv_heads, head_dim, v_dim, batch : int
        latent, k_scale, v_scale
            As of a `ShardedCache`.
        dtype : str
            As of a `ShardedCache`; q is of it too, and float32 over 8 bits.
        capacity : int
            Tokens of the longest sequence, beyond which nothing is taken.

        Raises
        ------
        ArgumentError
            Sizes that cannot be; the nodes go on.
        """
        self._forget()
        if latent:
            check_latent(v_dim, head_dim, 1.0)
        word = str(dtype_word(dtype))
        held = CacheFormat(word, k_scale=k_scale, v_scale=v_scale)
        given = word, bool(latent), held.k_scale, held.v_scale
        plan = CachePlan(layers, kv_heads, head_dim, v_dim or head_dim, *given)
        self._link.call("plan_cache", plan=plan, batch=batch, capacity=capacity)
        self._link.done()
        return self._made(plan, batch, capacity)

    def load(self, directory: str | Path, *, capacity: int | None = None) -> RemoteCache:
        """A cache on the nodes with what `RemoteCache.save` or `ShardedCache.save` wrote, on whatever number
        of ranks. The directory is shared by all processes.

        capacity: that of the saved cache unless given. Raises as `ShardedCache.load` and `cache` do; the
        nodes go on.
        """
        self._forget()
        self._link.call("load", directory=str(directory), capacity=capacity)
        index = saved.agree(self._link.comm, Path(directory))
        self._link.done()
        capacity = index.capacity if capacity is None else capacity
        cache = self._made(CachePlan.of(index), len(index.totals), capacity)
        cache.totals[:] = index.totals
        return cache

    def _made(self, plan: CachePlan, batch: int, capacity: int) -> RemoteCache:
        number, attention = len(self._planned), list[ViewAttention]()
        cache = RemoteCache(self._link, number, plan, batch, capacity, attention)
        self._planned.append(attention)
        weakref.finalize(cache, self._dropped.append, number).atexit = False
        return cache

    def _forget(self) -> None:
        """Have the nodes give back the memory of caches that are gone here."""
        while self._dropped:
            number = self._dropped.pop()
            self._link.call("drop", cache=number)
            _close(self._planned[number])

    def close(self) -> None:
        """End the nodes. Also done when the process ends."""
        if self._link.closed:
            return
        self._link.owner.take()
        if self._link.busy:
            job.end(1)  # an exception came in the middle of a step: the nodes wait for the rest of it
        self._link.close()
        atexit.unregister(self._exit)
        for attention in self._planned:
            _close(attention)
        self._link.tree.close()

    def _exit(self) -> None:
        """At the end of the process, also of threads that would go on."""
        self._link.owner.let_go()
        self.close()

    def __enter__(self) -> CacheNodes:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PeerError):
            _end(error)
        if error is not None and self._link.busy and not self._link.closed:  # of another process
            job.abort(error)
        self.close()


def _uncaught(
    otherwise: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """A node that was lost ends a program that does not catch it in one line: none of its calls is at
    fault."""
    if isinstance(error, PeerError):
        _end(error)
    otherwise(kind, error, trace)


def _end(error: PeerError) -> NoReturn:
    print(f"treeattn: {error}", file=sys.stderr)
    job.end(error.exit_code)


def _close(planned: list[ViewAttention]) -> None:
    """In the order in which the nodes do."""
    while planned:
        planned.pop(0).close()
