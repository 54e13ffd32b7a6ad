"""How the steps of a cache attend: what both ends of a step plan alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from treeattn.attention.mask import Rules
from treeattn.attention.shape import DTYPES
from treeattn.attention.shard import CacheFormat, Shard
from treeattn.backends import device
from treeattn.cache_nodes.message import Array
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import Decoder, Reduction
from treeattn.token_tree.tree import TokenTree
from treeattn.token_tree.verify import Drafts, blank_pads

__all__ = ["Attention", "CachePlan", "View", "per_sequence"]

_INT64 = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The shape of a cache on the nodes. dtype: of q too. latent: whether values are the first channels of
    the keys."""

    layers: int
    kv_heads: int
    head_dim: int
    v_dim: int
    dtype: str
    latent: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of what is kept: keys, and values of their own."""
        return (self.head_dim,) if self.latent else (self.head_dim, self.v_dim)

    def token_bytes(self, batch: int) -> int:
        """Of one token of every sequence in all layers."""
        itemsize: int = DTYPES[self.dtype].itemsize
        return batch * self.layers * self.kv_heads * sum(self.widths) * itemsize

    def new(self, batch: int, tokens: int) -> tuple[Array, ...]:
        """Keys and values of new tokens in a message."""
        dtype = DTYPES[self.dtype]
        return tuple(((batch, tokens, self.kv_heads, width), dtype) for width in self.widths)


def per_sequence(batch: int, *given: int) -> tuple[Array, ...]:
    """What a message has first where sequences get, or begin with, different numbers of tokens."""
    return (((batch,), _INT64),) * sum(given)


@dataclass(frozen=True, slots=True)
class View:
    """What steps over a cache have in common, and are planned for once."""

    cache: CachePlan
    batch: int
    queries: int
    heads: int
    scale: float
    rules: Rules

    def parts(self, tokens: int, counts: int, begins: int) -> tuple[Array, ...]:
        """The arrays of a step's message: per sequence counts and begins, where they come; q, and of `tokens`
        new ones k and v."""
        cache, batch = self.cache, self.batch
        q = (batch, self.queries, self.heads, cache.head_dim), DTYPES[cache.dtype]
        new = cache.new(batch, tokens) if tokens else ()
        return *per_sequence(batch, counts, begins), q, *new


class Attention:
    """A planned view, on either end. Creating it is collective over the model process and all nodes."""

    def __init__(self, view: View, comm: Communicator, schedule: Schedule) -> None:
        cache, queries = view.cache, np.arange(view.queries)
        differs = cache.v_dim != cache.head_dim or cache.latent
        self._plain, self._positional, self._queries = not view.rules.names, view.rules.positional, queries
        self._decoder = Decoder(
            comm,
            heads=view.heads,
            kv_heads=cache.kv_heads,
            head_dim=cache.head_dim,
            batch=view.batch,
            queries=view.queries,
            dtype=cache.dtype,
            scheme=Reduction(schedule, output="root"),
            scale=view.scale,
            rules=view.rules,
            cache=CacheFormat(v_dim=cache.v_dim) if differs else None,
        )
        empty, dtype = (view.batch, 0, cache.kv_heads), DTYPES[cache.dtype]
        #: Keys and values of the model process.
        self.nothing = np.empty((*empty, cache.head_dim), dtype), np.empty((*empty, cache.v_dim), dtype)

    @property
    def sent(self) -> list[tuple[int, int]]:
        """(destination, bytes) of the partials that this rank sends in a step."""
        sent = self._decoder.sent
        assert isinstance(sent, list)
        return sent

    def __call__(
        self, q: Any, k: Any, v: Any, lengths: Any, positions: Any, first: Any, begins: Any
    ) -> tuple[Any, Any]:
        """A step. positions: of this rank's tokens; first: where the first query of each sequence stands."""
        if self._plain and begins is None:
            return self._decoder(q, k, v, lengths)
        stands = first[:, None] + self._queries if self._positional else None
        return self._decoder(q, Shard(k, v, lengths, positions=positions), q_positions=stands, begins=begins)

    @functools.cached_property
    def _drafts(self) -> tuple[Drafts, Callable[[], object]]:
        """How the model process attends to drafts, and merges that into its records."""
        decoder = self._decoder
        drafts = Drafts(decoder.shape, device.find("cpu"), decoder.scale, None)
        return drafts, drafts.merged_into(decoder.records)

    def verify(self, q: Any, draft_k: Any, draft_v: Any, tree: TokenTree) -> tuple[Any, Any]:
        """The model process's end of a step in which it counts the drafts; the nodes, their context alone."""
        drafts, merge = self._drafts
        decoder = self._decoder
        decoder.local(q, *self.nothing, None)
        if drafts.attend(q, draft_k, draft_v, tree, tree.real):
            merge()
        decoder.reduce()
        out, lse = decoder.finish()
        blank_pads(tree, out, lse)
        return out, lse

    def close(self) -> None:
        """Collective."""
        self._decoder.close()
