"""How the steps of a cache attend: what both ends of a step plan the same way."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from treeattn.attention.arguments import CacheFormat, Positions, Rules, Shard
from treeattn.attention.arrays import Pair
from treeattn.attention.shape import CACHE_DTYPES, DTYPES, FLOAT8
from treeattn.cache.saved import Index
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import Decoder, Reduction
from treeattn.partial import Array


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The shape of a cache on the nodes. dtype: of q too, which is float32 over 8 bits. latent, k_scale and
    v_scale: as of a `ShardedCache`."""

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

    @property
    def q_dtype(self) -> str:
        """The dtype of queries."""
        return "float32" if self.dtype in FLOAT8 else self.dtype

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of what is kept: keys, and values of their own."""
        return (self.head_dim,) if self.latent else (self.head_dim, self.v_dim)


@dataclass(frozen=True, slots=True)
class View:
    """What steps over a cache have in common, and are planned for once."""

    cache: CachePlan
    batch: int
    queries: int
    heads: int
    scale: float
    rules: Rules


class ViewAttention:
    """A planned view, on either end. Creating it is collective over the model process and all nodes."""

    def __init__(self, view: View, comm: Communicator, schedule: Schedule) -> None:
        cache, queries = view.cache, np.arange(view.queries)
        quantized = cache.k_scale is not None
        differs = cache.v_dim != cache.head_dim or cache.latent or quantized
        held = CacheFormat(
            dtype=cache.dtype if quantized else None,
            v_dim=cache.v_dim,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )
        self._plain, self._positional, self._queries = not view.rules.names, view.rules.positional, queries
        self._decoder = Decoder(
            comm,
            heads=view.heads,
            kv_heads=cache.kv_heads,
            head_dim=cache.head_dim,
            batch=view.batch,
            queries=view.queries,
            dtype=cache.q_dtype,
            scheme=Reduction(schedule, output="root"),
            scale=view.scale,
            rules=view.rules,
            cache=held if differs else None,
        )
        empty, dtype = (view.batch, 0, cache.kv_heads), CACHE_DTYPES[cache.dtype]
        shape = view.batch, view.queries, view.heads, cache.head_dim
        self._q = np.empty(shape, DTYPES[cache.q_dtype])  # of each step: where the decoder has seen it before
        #: Keys and values of the model process.
        self.nothing = np.empty((*empty, cache.head_dim), dtype), np.empty((*empty, cache.v_dim), dtype)

    @property
    def sent(self) -> list[tuple[int, int]]:
        """(destination, bytes) of the partials that this rank sends in a step."""
        sent = self._decoder.sent
        assert isinstance(sent, list)
        return sent

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        lengths: Array | None,
        positions: Positions,
        first: Array,
        begins: Array | None,
        mask: Array | None = None,
    ) -> Pair:
        """A step. positions: of this rank's tokens; first: where the first query of each sequence stands;
        mask: who sees which of the last tokens, where others see all."""
        self._q[...] = q
        if self._plain and begins is None:
            return self._decoder(self._q, k, v, lengths, mask=mask)
        stands = first[:, None] + self._queries if self._positional else None
        shard = Shard(k, v, lengths, positions=positions)
        return self._decoder(self._q, shard, q_positions=stands, begins=begins)

    def close(self) -> None:
        """Collective."""
        self._decoder.close()
