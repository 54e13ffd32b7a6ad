"""Ring Attention for decode: the keys and values travel (Liu et al., arXiv 2310.01889)."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from treeattn.attention.shape import DTYPES, Shape
from treeattn.backends import cpu
from treeattn.collectives.runtime.mpi_communicator import duplicate
from treeattn.collectives.runtime.reducer import Reducer, ReductionSpec
from treeattn.errors import StateError
from treeattn.partial import Array

LARGEST_MESSAGE = 1 << 30  # bytes


class KvRing(Reducer):
    """Every rank attends to every shard: its own first, then those that arrive from its left neighbour.

    While a rank computes on the block that it holds, this block is on its way to the right and the next one
    on its way in, into the other of two buffers; how much of that happens at once is up to the MPI library.
    A hop is two messages, keys and values; none for a shard without tokens, and several in place of one that
    is longer than `LARGEST_MESSAGE`: MPI libraries before MPI 4 count with 32 bits. There are p-1 hops; with
    ``rotation="full"`` p, the own shard travelling home again, as in published code; of one rank none.

    Per hop a rank sends 2 b t d elements (b sequences, t tokens per shard, d = KV heads * head_dim). Equation
    10 of arXiv 2408.04093, V = 2 b t d p, is that with p hops; here it is 2 b t d (p-1) by default.

    A shard travels as [batch, t, KV heads, head_dim] with t the longest of its lengths, straight from the
    caller's arrays where the first t tokens lie in one piece, else packed. The lengths of all shards are
    agreed in every step by one all-gather of `batch` 8-byte integers per rank, which `sent` does not count.

    Each rank keeps one partial per shard and merges them in ascending order of owners. Since
    every rank computes every partial, all end with the same bits only if they compute the same way: with the
    same instruction set, and with or without compiled kernels.

    `take` names the arrays of the next step. ``start()`` and ``wait()`` both compute and communicate.
    """

    def __init__(
        self,
        reduction: ReductionSpec,
        shape: Shape,
        scale: float,
        records: Array,
        rotation: str,
    ) -> None:
        """Collective. records: [batch, heads, queries, head_dim + 2], where the result goes."""
        super().__init__("kv_ring")
        comm, merge = reduction.comm, reduction.operator
        self._private = duplicate(comm)
        self._comm = self._private.unwatched  # a step counts itself
        self._rank: int = comm.rank
        self._size: int = comm.size
        self._hops = self._size if rotation == "full" and self._size > 1 else self._size - 1
        self._shape = shape
        self._partials = [records, *(np.empty_like(records) for _ in range(1, self._size))]
        self._attention = [cpu.PlannedAttention(partial, scale=scale) for partial in self._partials]
        into, *others = (partial.reshape(-1, merge.width) for partial in self._partials)
        self._merges = [merge.planned_merge(into, other) for other in others]
        self._own_lengths = np.zeros(shape.batch, np.int64)
        self._lengths = np.zeros((self._size, shape.batch), np.int64)
        self._lengths_of = list(self._lengths)  # one and the same view in every step
        self._tokens: list[int] | None = None  # of each rank's shard
        self._source: tuple[Array, Array] | None = None
        self._buffers = [np.empty(0, DTYPES[shape.dtype]) for _ in range(3)]
        self._requests: list[MPI.Request] = []
        self._q: Any = None
        self._kv: Any = None
        # Of the last step, without the agreement on lengths.
        self.sent: list[tuple[int, int]] = []

    def take(self, q: Array, k: Array, v: Array, lengths: Array | None = None) -> None:
        super()._check()
        if lengths is None:
            self._own_lengths[:] = k.shape[1]
        else:
            self._own_lengths[:] = self._shape.check_lengths(lengths, k.shape[1])
        self._q, self._kv = q, (k, v)

    def _check(self) -> None:
        super()._check()
        if self._q is None:
            raise StateError("kv_ring: a step without arrays: local() comes before reduce()")

    def _begin(self) -> None:
        """Agree on lengths, send the own shard on its way and attend to it."""
        self._comm.Allgather(self._own_lengths, self._lengths)
        self._plan(self._lengths.max(axis=1).tolist())
        self._bind(*self._kv)
        self.sent = []
        self._visit(0)

    def _complete(self) -> None:
        """Attend to all other shards, then merge."""
        for hop in range(1, self._size):
            self._arrive()
            self._visit(hop)
        self._arrive()
        for merge in self._merges:
            merge()
        self._q = self._kv = None

    def _owner(self, hop: int) -> int:
        return (self._rank - hop) % self._size

    def _visit(self, hop: int) -> None:
        """Pass on the block of this hop and attend to it meanwhile."""
        if hop < self._hops:
            self._requests = self._receive(hop + 1) + self._send(hop)
        owner = self._owner(hop)
        self._attention[owner](self._q, *self._blocks[hop], self._lengths_of[owner])

    def _receive(self, hop: int) -> list[MPI.Request]:
        left = (self._rank - 1) % self._size
        return [self._comm.Irecv(part, left, tag) for tag, part in enumerate(self._bytes[hop])]

    def _send(self, hop: int) -> list[MPI.Request]:
        right = (self._rank + 1) % self._size
        self.sent += [(right, part.size) for part in self._bytes[hop]]
        return [self._comm.Isend(part, right, tag) for tag, part in enumerate(self._bytes[hop])]

    def _arrive(self) -> None:
        MPI.Request.Waitall(self._requests)
        self._requests = []

    def _plan(self, tokens: list[int]) -> None:
        """Blocks by hop: 0 is the own shard, later ones alternate between two buffers."""
        if tokens == self._tokens:
            return
        coming = [tokens[self._owner(hop)] for hop in range(1, self._hops + 1)]
        for buffer in range(2):
            self._reserve(buffer, max(coming[buffer::2], default=0))
        self._packed: tuple[Array, Array] | None = None
        self._source = None
        own = (self._buffers[2][:0],) * 2  # comes with the arrays, in _bind
        self._blocks = [own, *(self._block(hop % 2, t) for hop, t in enumerate(coming))]
        self._bytes = [_as_bytes(block) for block in self._blocks]
        self._tokens = tokens

    def _reserve(self, buffer: int, tokens: int) -> None:
        """Make room for a block; a cache that grows token by token shall not allocate at each of them."""
        held, needed = self._buffers[buffer].size, 2 * self._elements(tokens)
        if held < needed:
            self._buffers[buffer] = np.empty(
                needed + (needed // 8 if held else 0), self._buffers[buffer].dtype
            )

    def _elements(self, tokens: int) -> int:
        return self._shape.batch * tokens * self._shape.kv_heads * self._shape.head_dim

    def _block(self, buffer: int, tokens: int) -> tuple[Array, Array]:
        k, v = self._buffers[buffer][: 2 * self._elements(tokens)].reshape(2, -1)
        shape = self._shape.batch, tokens, self._shape.kv_heads, self._shape.head_dim
        return k.reshape(shape), v.reshape(shape)

    def _bind(self, k: Array, v: Array) -> None:
        """The own shard's valid tokens as the block of hop 0, packed where they are not in one piece."""
        assert self._tokens is not None
        tokens = self._tokens[self._rank]
        if self._source is None or self._source[0] is not k or self._source[1] is not v:
            self._source = k, v
            block = k[:, :tokens], v[:, :tokens]
            self._packed = None
            if not all(part.flags.c_contiguous for part in block):
                self._reserve(2, tokens)
                self._packed = block = self._block(2, tokens)
            self._blocks[0], self._bytes[0] = block, _as_bytes(block)
        if self._packed:
            for into, part in zip(self._packed, (k, v), strict=True):
                # The view: bits of bfloat16 may come as uint16, and must not be taken for numbers.
                np.copyto(into, part.view(into.dtype)[:, :tokens], casting="no")

    def _release(self) -> None:
        self._private.free()


def _as_bytes(block: tuple[Array, Array]) -> tuple[Array, ...]:
    """Flat views for MPI, which has no 16-bit floating point type: one for each message."""
    flat = [part.reshape(-1).view(np.uint8) for part in block]
    return tuple(
        part[start : start + LARGEST_MESSAGE]
        for part in flat
        for start in range(0, part.size, LARGEST_MESSAGE)
    )


plan = KvRing
