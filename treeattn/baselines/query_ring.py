"""The ring where the small thing travels, past the shards (pass-Q, Yang et al., arXiv 2411.01783)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from treeattn.attention.shape import Shape
from treeattn.backends import cpu
from treeattn.collectives.runtime.memory import PeerArray
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
        rank, size = reduction.comm.rank, reduction.comm.size
        cuts = [shape.kv_heads * s // size for s in range(size + 1)]
        # In the order of the hops: slice `rank` first, then those that arrive from the left.
        self._order = [(rank - hop) % size for hop in range(size)]
        self._kv_heads = [slice(cuts[s], cuts[s + 1]) for s in self._order]
        group = shape.heads // shape.kv_heads
        self._heads = [slice(kv.start * group, kv.stop * group) for kv in self._kv_heads]
        self._parts = [np.empty_like(records[:, heads], order="C") for heads in self._heads]
        self._attention = [cpu.PlannedAttention(part, scale=scale) for part in self._parts]
        self._shape = shape
        self._bound: tuple[Array, Array, Array] | None = None
        self._views: list[tuple[Array, Array, Array]] = []
        self._lengths: Array | None = None
        self._taken = False
        self.sent: list[tuple[int, int]] = []  # a slice of no heads is not
        self._merges = list(self._plan_hops(reduction.operator, (rank - 1) % size, (rank + 1) % size))
        self._copies = list(self._plan_gathering(records, rank, size))

    def _plan_hops(self, merge: Operator, left: int, right: int) -> Iterator[Callable[[], object]]:
        """Round `hop` of the messages passes this hop's slice on, and brings the next one, which merges."""
        for hop, (part, following) in enumerate(pairwise(self._parts)):
            arrived = np.empty_like(following)
            self._add(hop, [(arrived, left)], [(part, right)])
            flat = (array.reshape(-1, merge.width) for array in (following, arrived))
            yield merge.planned_merge(*flat) if following.size else tuple

    def _plan_gathering(self, records: Array, rank: int, size: int) -> Iterator[tuple[Array, Array]]:
        """The last slice of the order is whole on this rank; slice s comes whole from rank s - 1. What is to
        be copied at last: into, from."""
        whole = self._parts[-1]
        yield records[:, self._heads[-1]], whole
        takes = []
        for s, heads in zip(self._order[:-1], self._heads, strict=False):
            place = records[:, heads]
            target = place if place.flags.c_contiguous else np.empty_like(place, order="C")
            takes.append((target, (s - 1) % size))
            if target is not place:
                yield place, target
        self._add(size - 1, takes, [(whole, other) for other in range(size) if other != rank])

    def _add(self, number: int, receives: list[PeerArray], sends: list[PeerArray]) -> None:
        """A round of the messages, without those of no heads."""
        receives, sends = ([one for one in given if one[0].size] for given in (receives, sends))
        self.messages.add(number, receives, sends)
        self.sent += [(peer, array.nbytes) for array, peer in sends]

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
        self._attend(0)
        self.messages.start(0)

    def _attend(self, hop: int) -> None:
        if self._parts[hop].size:
            self._attention[hop](*self._views[hop], self._lengths)

    def _complete(self) -> None:
        """Contribute to the slices that pass by; the last round gathers all of them."""
        for hop, merge in enumerate(self._merges):
            self._attend(hop + 1)
            self.messages.wait(hop)
            merge()
            self.messages.start(hop + 1)
        self.messages.wait(len(self._merges))
        for place, whole in self._copies:
            np.copyto(place, whole)
        self._taken = False

    def _release(self) -> None:
        self.messages.close()


plan = QueryRing
