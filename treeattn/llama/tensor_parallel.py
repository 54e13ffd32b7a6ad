"""Linear maps, whole on a rank or tensor-parallel over ranks as in Megatron-LM (arXiv 1909.08053).

Column-parallel maps (q, k, v, gate, up) are cut by outputs, row-parallel ones (o, down) by inputs, both ends
of the vocabulary by tokens. That is right where all ranks have the same tokens. Where each has its own, as in
a prefill, `gather_weights` brings a matrix together for as long as it is needed: it costs the weights once,
however long the prompt is. All of it travels by MPI, arrays of a GPU staged through the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeattn.backends.device import Device
from treeattn.collectives.runtime import watchdog
from treeattn.llama.config import Config
from treeattn.llama.weights import EMBEDDING, HEAD, Weights
from treeattn.mpi.communicators import MpiCommunicator
from treeattn.partial import Array
from treeattn.shards import block, parts

Tokens = NDArray[np.int64]

_BLOCK = 1024  # tokens of a prompt whose vectors travel at once


class Linear:
    """A map of x [tokens, in] to x @ weight.T + bias [tokens, out] in float32, or several of one input whose
    outputs are concatenated; weights: [out, in] of each, as the model has them."""

    def __init__(self, device: Device, weights: Sequence[Array], bias: Array | None = None) -> None:
        self.device, self.weights, self.bias = device, weights, bias
        self._product = device.product(weights)

    def __call__(self, x: Array) -> Array:
        return self._add_bias(self._product(x))

    def _add_bias(self, y: Array) -> Array:
        if self.bias is not None:
            y += self.bias
        return y

    def gather_weights(self) -> Linear:
        """The map with all of its weights. Collective where ranks hold parts of them."""
        return self


class Embedding:
    """The vectors [tokens, hidden_size] of token numbers, which lie on the host."""

    def __init__(self, device: Device, weight: Array) -> None:
        self.device, self.weight = device, weight

    def __call__(self, tokens: Tokens, sequence_parallel: bool) -> Array:
        """Look up the same tokens on every rank, or (`sequence_parallel`) each rank's own."""
        return self._vectors(self.device.from_host(tokens))

    def _vectors(self, rows: Any) -> Array:
        vectors: Array = self.weight[rows].astype(np.float32)
        return vectors


class ShardedAxis(NamedTuple):
    """Heads, rows or columns in balanced blocks over ranks; a head has `unit` rows."""

    blocks: int
    unit: int = 1

    @property
    def length(self) -> int:
        """Rows of all ranks together."""
        return self.blocks * self.unit

    def shard(self, rank: int, size: int) -> slice:
        """The rows of this axis that a rank holds."""
        own = block(self.blocks, rank, size)
        return slice(own.start * self.unit, own.stop * self.unit)


def sharded_axis(name: str, config: Config) -> ShardedAxis | None:
    """What of a tensor is sharded: rows, of o_proj and down_proj columns; None: every rank has it whole."""
    if name.endswith(("o_proj.bias", "down_proj.bias")):  # added once, to the sum over ranks
        return None
    heads, kv_heads = (ShardedAxis(count, config.head_dim) for count in (config.heads, config.kv_heads))
    tokens, mlp = ShardedAxis(config.vocab_size), ShardedAxis(config.intermediate_size)
    axes = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads, "o_proj": heads}
    axes |= {"gate_proj": mlp, "up_proj": mlp, "down_proj": mlp, "embed_tokens": tokens, "lm_head": tokens}
    return axes.get(name.split(".")[-2])


class TensorParallelGroup:
    """The ranks that hold a model's weights in parts, and their collectives."""

    def __init__(self, comm: MpiCommunicator, device: Device) -> None:
        self.comm, self.rank, self.size, self.device = comm, comm.rank, comm.size, device
        self.activity = watchdog.Activity("the model's sharded weights")

    def on_host(self, array: Array) -> Array:
        """An array of the device as MPI reads it: C-contiguous, the array itself where it is that."""
        return np.ascontiguousarray(self.device.readable(array))

    def all_reduce(self, part: Array) -> Array:
        """The sum over ranks, a new array."""
        mine = self.on_host(part)
        total = np.empty_like(mine)
        with self.activity:
            self.comm.Allreduce(mine, total)
        return self.device.from_host(total)


class _AllGather:
    """Gathers rows that are sharded along one axis, or along several that follow one another."""

    def __init__(self, group: TensorParallelGroup, axes: Sequence[ShardedAxis]) -> None:
        self._group, ends = group, np.cumsum([axis.length for axis in axes])
        placed = [(end - axis.length, axis) for end, axis in zip(ends, axes, strict=True)]
        arriving = [
            [np.arange(axis.length)[axis.shard(rank, group.size)] + start for start, axis in placed]
            for rank in range(group.size)
        ]
        self._counts = [sum(map(len, rows)) for rows in arriving]
        self._order = np.argsort(np.concatenate([rows for own in arriving for rows in own]))
        self._in_order = len(axes) == 1

    def __call__(self, rows: Array) -> Array:
        """All rows [rows of all axes, columns] on the device, from this rank's."""
        mine = self._group.on_host(rows)
        gathered = np.empty((sum(self._counts), mine.shape[1]), mine.dtype)
        row_bytes = mine.shape[1] * mine.itemsize
        with self._group.activity:  # as bytes: MPI has no name for bfloat16
            counts = [count * row_bytes for count in self._counts]
            self._group.comm.Allgatherv(mine.view(np.uint8), (gathered.view(np.uint8), counts))
        return self._group.device.from_host(gathered if self._in_order else gathered[self._order])


class ColumnParallelLinear(Linear):
    """The outputs of maps of one input, of which each rank makes a part: left there, or with `gather_output`
    all on every rank. axes: of the outputs of each map; part: this rank's rows."""

    def __init__(
        self,
        group: TensorParallelGroup,
        axes: Sequence[ShardedAxis],
        part: Linear,
        gather_output: bool = False,
    ) -> None:
        super().__init__(part.device, part.weights, part.bias)
        self._gather, self._gather_output = _AllGather(group, axes), gather_output
        self._gather_each = [_AllGather(group, [axis]) for axis in axes]

    def __call__(self, x: Array) -> Array:
        y = super().__call__(x)
        return self._gather(y.T).T if self._gather_output else y

    def gather_weights(self) -> Linear:
        bias = None if self.bias is None else self._gather(self.bias[:, None])[:, 0]
        pairs = zip(self._gather_each, self.weights, strict=True)
        return Linear(self.device, [gather(weight[:]) for gather, weight in pairs], bias)


class RowParallelLinear(Linear):
    """The sum over ranks of what each makes of its own inputs; the bias is whole, on every rank."""

    def __init__(self, group: TensorParallelGroup, axis: ShardedAxis, part: Linear) -> None:
        super().__init__(part.device, part.weights, part.bias)
        self._group, self._gather = group, _AllGather(group, [axis])
        self._own, self._inputs = axis.shard(group.rank, group.size), axis.length

    def __call__(self, x: Array) -> Array:
        """Map x of all inputs, or of this rank's alone."""
        mine = x[:, self._own] if x.shape[1] == self._inputs else x
        return self._add_bias(self._group.all_reduce(self._product(mine)))

    def gather_weights(self) -> Linear:
        return Linear(self.device, [self._gather(self.weights[0][:].T).T], self.bias)


class VocabParallelEmbedding(Embedding):
    """The vectors of tokens, of which every rank holds some and adds 0 for the others. Collective."""

    def __init__(self, group: TensorParallelGroup, axis: ShardedAxis, weight: Array) -> None:
        super().__init__(group.device, weight)
        self._group, self._own = group, axis.shard(group.rank, group.size)

    def __call__(self, tokens: Tokens, sequence_parallel: bool) -> Array:
        group = self._group
        if not sequence_parallel:
            return group.all_reduce(self._own_vectors(tokens))
        mine = np.empty((len(tokens), self.weight.shape[1]), np.float32)
        with group.activity:
            wanted = group.comm.allgather(tokens)
        for root, theirs in enumerate(wanted):
            for rows in parts(len(theirs), _BLOCK):
                vectors = group.on_host(self._own_vectors(theirs[rows]))
                with group.activity:
                    group.comm.Reduce(vectors, mine[rows] if group.rank == root else None, root=root)
        return self.device.from_host(mine)

    def _own_vectors(self, tokens: Tokens) -> Array:
        vectors: Array = self.device.namespace.zeros((len(tokens), self.weight.shape[1]), np.float32)
        here = np.flatnonzero((tokens >= self._own.start) & (tokens < self._own.stop))
        if len(here):
            rows = self.device.from_host(tokens[here] - self._own.start)
            vectors[self.device.from_host(here)] = self._vectors(rows)
        return vectors


class Loader:
    """Loads maps onto a device: whole, or with `group` this rank's part of each; nbytes: of
    all of them."""

    def __init__(
        self,
        weights: Weights,
        device: Device,
        group: TensorParallelGroup | None,
    ) -> None:
        self.weights, self.device, self._group, self.nbytes = weights, device, group, 0

    def tensor(self, name: str) -> Array:
        """A vector or a matrix on the device, or this rank's part of it."""
        own, summed = self._own(name), name.endswith(("o_proj.weight", "down_proj.weight"))
        read = self.weights.read(name, *((None, own) if summed else (own, None)))
        placed: Array = read if self.weights.mapped else self.device.weights(read)
        self.nbytes += placed.nbytes
        return placed

    def linear(self, name: str) -> Linear:
        """A map whose inputs are what is sharded: row-parallel."""
        part = self._part(name)
        return part if self._group is None else RowParallelLinear(self._group, self._axis(name), part)

    def stacked(self, *names: str, gather_output: bool = False) -> Linear:
        """Maps of one input, whose outputs are concatenated: column-parallel."""
        part, axes = self._part(*names), [*map(self._axis, names)]
        return part if self._group is None else ColumnParallelLinear(self._group, axes, part, gather_output)

    def vocabulary(self) -> tuple[Embedding, Linear]:
        """The embedding and the head, which are one matrix where they are tied."""
        embedding, group, axis = self.tensor(EMBEDDING), self._group, self._axis("lm_head")
        if self.weights.config.tied:
            self.weights.check_tied(self._own(HEAD))
        head = Linear(self.device, [embedding if self.weights.config.tied else self.tensor(HEAD)])
        if group is None:
            return Embedding(self.device, embedding), head
        return VocabParallelEmbedding(group, axis, embedding), ColumnParallelLinear(group, [axis], head, True)

    def _part(self, *names: str) -> Linear:
        biases = [self.tensor(f"{name}.bias") for name in names if f"{name}.bias" in self.weights.shapes]
        weights = [self.tensor(f"{name}.weight") for name in names]
        bias = self.device.namespace.concatenate(biases) if biases else None
        return Linear(self.device, weights, bias)

    def _axis(self, name: str) -> ShardedAxis:
        axis = sharded_axis(f"{name}.weight", self.weights.config)
        assert axis is not None
        return axis

    def _own(self, name: str) -> slice | None:
        axis = sharded_axis(name, self.weights.config)
        return None if self._group is None or axis is None else axis.shard(self._group.rank, self._group.size)
