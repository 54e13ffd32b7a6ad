"""The ring where the small thing travels, past the shards (pass-Q, Yang et al., arXiv 2411.01783)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from treeattn.attention.shape import Shape
from treeattn.backends import cpu
from treeattn.collectives.runtime.mpi_communicator import MpiMessages
from treeattn.collectives.runtime.operator import Operator
from treeattn.collectives.runtime.reducer import Reducer, ReductionSpec
from treeattn.errors import StateError
from treeattn.partial import Array


class QueryRing(Reducer):
    """Slices of the query heads go around the ring and collect each shard's contribution.

    The query is on every rank already, so of a slice only the partial travels. The heads are cut into p
    slices between KV heads (fewer slices than ranks if there are fewer KV heads). Slice s starts on rank s;
    in p-1 hops it visits all other ranks, each of which merges its own partial of that slice. What a rank
    contributes does not depend on what arrives, so it computes the next slice's part while the message is
    under way. At last the rank s-1 holds slice s whole and sends it to all others.

    A rank sends p-1 messages in hops and p-1 in the end; if p divides the KV heads, 2 (p-1)/p of the
    records: equation 14 of arXiv 2408.04093. Each slice is merged in one order and then copied: the same
    bits on every rank. `take` names the arrays of the next step. ``start()`` and ``wait()`` both compute and
    communicate.
    """

    def __init__(self, reduction: ReductionSpec, shape: Shape, scale: float, records: Array) -> None:
        """Collective. records: [batch, heads, queries, head_dim + 2], where the result goes."""
        super().__init__("query_ring")
        self.messages = MpiMessages(reduction.comm, "query_ring")
        self._rank, self._size = rank, size = reduction.comm.rank, reduction.comm.size
        cuts = [shape.kv_heads * s // size for s in range(size + 1)]
        # In the order of the hops: slice `rank` first, then those that arrive from the left.
        self._order = [(rank - hop) % size for hop in range(size)]
        self._kv_heads = [slice(cuts[s], cuts[s + 1]) for s in self._order]
        group = shape.heads // shape.kv_heads
        self._heads = [slice(kv.start * group, kv.stop * group) for kv in self._kv_heads]
        self._parts = [np.empty_like(records[:, heads], order="C") for heads in self._heads]
        self._attention = [cpu.PlannedAttention(part, scale=scale) for part in self._parts]
        self._shape, self._records = shape, records
        self._bound: tuple[Array, Array, Array] | None = None
        self._views: list[tuple[Array, Array, Array]] = []
        self._lengths: Array | None = None
        self._taken = False
        self.sent: list[tuple[int, int]] = []  # a slice of no heads is not
        self._plan_hops(reduction.operator)
        self._plan_gathering()

    def _plan_hops(self, merge: Operator) -> None:
        rank, size = self._rank, self._size
        left, right = (rank - 1) % size, (rank + 1) % size
        self._incoming: list[MPI.Prequest | None] = [None] * size
        self._outgoing: list[MPI.Prequest | None] = [None] * size
        self._merges: dict[int, Callable[[], object]] = {}
        for hop, part in enumerate(self._parts):
            if not part.size:
                continue
            if hop:
                arrived = np.empty_like(part)
                self._incoming[hop] = self.messages.receive(arrived, left, hop - 1)
                self._merges[hop] = merge.planned_merge(
                    part.reshape(-1, merge.width), arrived.reshape(-1, merge.width)
                )
            if hop < size - 1:
                self._outgoing[hop] = self.messages.send(part, right, hop)
                self.sent.append((right, part.nbytes))

    def _plan_gathering(self) -> None:
        """The last slice of the order is whole on this rank; slice s comes whole from rank s - 1."""
        rank, size = self._rank, self._size
        whole = self._parts[-1]
        others = [r for r in range(size) if r != rank] if whole.size else []
        self._gives = [self.messages.send(whole, r, size) for r in others]
        self.sent += [(r, whole.nbytes) for r in others]
        self._takes: list[MPI.Prequest] = []
        self._copies = [(self._records[:, self._heads[-1]], whole)]
        for s, heads in zip(self._order[:-1], self._heads, strict=False):
            place = self._records[:, heads]
            if not place.size:
                continue
            target = place if place.flags.c_contiguous else np.empty_like(place, order="C")
            self._takes.append(self.messages.receive(target, (s - 1) % size, size))
            if target is not place:
                self._copies.append((place, target))
        self._receives = [request for request in self._incoming if request] + self._takes
        self._sends = [request for request in self._outgoing if request] + self._gives

    def take(self, q: Array, k: Array, v: Array, lengths: Array | None = None) -> None:
        super()._check()
        self._lengths = None if lengths is None else self._shape.check_lengths(lengths, k.shape[1])
        bound = self._bound
        if bound is None or bound[0] is not q or bound[1] is not k or bound[2] is not v:
            cuts = zip(self._heads, self._kv_heads, strict=True)
            self._views = [(q[:, :, heads], k[:, :, kv], v[:, :, kv]) for heads, kv in cuts]
            self._bound = q, k, v
        self._taken = True

    def _check(self) -> None:
        super()._check()
        if not self._taken:
            raise StateError("query_ring: a step without arrays: local() comes before reduce()")

    def _begin(self) -> None:
        """Contribute to the slice that starts here and send it on its way."""
        MPI.Prequest.Startall(self._receives)
        self._attend(0)
        self._pass_on(0)

    def _attend(self, hop: int) -> None:
        if self._parts[hop].size:
            self._attention[hop](*self._views[hop], self._lengths)

    def _pass_on(self, hop: int) -> None:
        outgoing = self._outgoing[hop]
        if outgoing:
            outgoing.Start()

    def _complete(self) -> None:
        """Contribute to the slices that pass by, then gather all of them."""
        for hop in range(1, len(self._parts)):
            self._attend(hop)
            incoming = self._incoming[hop]
            if incoming:
                incoming.Wait()
                self._merges[hop]()
            self._pass_on(hop)
        MPI.Prequest.Startall(self._gives)
        MPI.Prequest.Waitall(self._takes + self._sends)
        for place, whole in self._copies:
            np.copyto(place, whole)
        self._taken = False

    def _release(self) -> None:
        self.messages.close()


plan = QueryRing
