"""How the steps of a cache attend: what both ends of a step plan the same way."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from treeattn.attention.arguments import CacheFormat, Positions, Rules, Shard
from treeattn.attention.arrays import Pair
from treeattn.attention.shape import CACHE_DTYPES, DTYPES, FLOAT8, Shape
from treeattn.cache.saved import Index
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import Decoder, Reduction
from treeattn.partial import Array


@dataclass(frozen=True, slots=True)
class CachePlan:
    """A cache on the nodes, by the arguments of a `ShardedCache`."""

    layers: int
    kv_heads: int
    head_dim: int
    v_dim: int
    dtype: str
    latent: bool = False
    k_scale: ArrayLike | None = None
    v_scale: ArrayLike | None = None

    @classmethod
    def of(cls, index: Index) -> CachePlan:
        """The plan of a saved cache."""
        return cls(**{field.name: getattr(index, field.name) for field in fields(cls)})

    def shape(self, batch: int, queries: int, heads: int) -> Shape:
        """Of a step of so many queries, which are float32 over 8 bits. Raises `ArgumentError`."""
        dtype = "float32" if self.dtype in FLOAT8 else self.dtype
        held = self.dtype, self.k_scale, self.v_scale, self.v_dim
        return Shape(batch, queries, heads, self.kv_heads, self.head_dim, dtype, *held)


class View(NamedTuple):
    """What steps over a cache have in common, and are planned for once."""

    shape: Shape
    scale: float
    rules: Rules


class ViewAttention:
    """A planned view, on either end. Creating it is collective over the model process and all nodes."""

    def __init__(self, view: View, comm: Communicator, schedule: Schedule) -> None:
        self.shape = shape = view.shape
        rules = view.rules
        held = CacheFormat(shape.kv_dtype, shape.v_dim, k_scale=shape.k_scale, v_scale=shape.v_scale)
        how = Reduction(schedule, output="root")
        planned: dict[str, Any] = {"scheme": how, "scale": view.scale, "rules": rules, "cache": held}
        self._decoder = Decoder(comm, **shape.plain, **planned)
        self._plain, self._positional = not rules.names, rules.positional
        self._queries = np.arange(shape.queries)
        self._q = np.empty(shape.q_shape, DTYPES[shape.dtype])  # of each step: the decoder knows it again
        #: Keys and values of the model process.
        self.nothing = tuple(
            np.empty((shape.batch, 0, shape.kv_heads, width), CACHE_DTYPES[str(shape.kv_dtype)])
            for width in (shape.head_dim, shape.v_dim)
        )

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        lengths: Array | None,
        positions: Positions,
        first: Array,
        begins: Array | None,
    ) -> Pair:
        """A step. positions: of this rank's tokens; first: where the first query of each sequence stands."""
        self._q[...] = q
        if self._plain and begins is None:
            return self._decoder(self._q, k, v, lengths)
        stands = first[:, None] + self._queries if self._positional else None
        shard = Shard(k, v, lengths, positions=positions)
        return self._decoder(self._q, shard, q_positions=stands, begins=begins)

    def close(self) -> None:
        """Collective."""
        self._decoder.close()
