"""Where the tokens of a layer lie, and attention to them: one operator, also of a compiled model."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from treeattn.errors import StateError
from treeattn.huggingface import plans, tensor_parallel
from treeattn.huggingface.agreeing_ranks import check_same_tokens
from treeattn.huggingface.plans import Scoring
from treeattn.huggingface.remote import RemoteLayer
from treeattn.huggingface.tensors import as_rows, as_tensor

if TYPE_CHECKING:
    from treeattn.cache.sharded import CacheLayer
    from treeattn.huggingface.cache import ShardedKV
    from treeattn.huggingface.latent import Latents

_numbers = itertools.count(1)
_stores: weakref.WeakValueDictionary[int, Store] = weakref.WeakValueDictionary()


class Store:
    """This rank's tokens of one layer, and how to attend to those of all ranks."""

    def __init__(self, cache: ShardedKV, heads: int | None) -> None:
        self._cache, self.shard = cache, cast("CacheLayer | RemoteLayer | None", None)
        self._heads, self._kind = heads, cast("tuple[Any, ...]", ())
        self.alike = 1  # layers of the cache whose keys have such heads
        self.rank = 0  # of the latents that lie here in place of keys and values
        self.first = cast("list[torch.Tensor] | None", None)  # token's latents, and what was made of them
        self.handle, self.slots = next(_numbers), 0
        _stores[self.handle] = self

    def use(self) -> None:
        """Note that this thread uses the cache, as `ShardedKV.use` does."""
        self._cache.use()

    def append(self, k: Any, v: Any = None) -> None:
        """The next tokens, [batch, tokens, kv_heads, dim], of which this rank keeps its own; of latents no
        v."""
        self._made(k, v).append(k, v)
        self.slots += k.shape[1]

    def append_own(self, tokens: int, k: Any, v: Any = None) -> None:
        """Add the next `tokens` tokens, of which k and v are this rank's."""
        self._made(k, v).append_own(k, v, [tokens] * len(k))
        self.slots += tokens

    def hold(self, shard: CacheLayer | RemoteLayer, slots: int, rank: int) -> None:
        """Go on with what was saved."""
        self.shard, self.slots, self.rank = shard, slots, rank

    def _made(self, k: Any, v: Any) -> Any:
        v_dim = self.rank if v is None else v.shape[3]
        kind, shard = (k.shape[2:], v_dim, v is None, k.dtype), self.shard
        if shard is None or ((kind != self._kind or len(shard.totals) != len(k)) and not shard.totals.any()):
            self.shard, self._kind = self._cache.new_shard(k, v_dim, v is None, self.alike), kind
        return self.shard

    def check_tokens(self, key: torch.Tensor, begins: Any) -> None:
        """Once for a step: whether all ranks were given the same, unless it is a token on whose scores they
        have agreed. Collective."""
        cache = self._cache
        if self is not cache.layers[cache.first].store or cache.comm.size == 1:
            return
        if not cache.follows or key.shape[2] > 1:
            check_same_tokens(cache.comm, key, begins)
        cache.follows = False

    def crop(self, slots: int) -> None:
        """Forget the slots from `slots` on."""
        self.slots = slots
        if self.shard is not None:
            self.shard.rollback(np.full_like(self.shard.totals, slots))

    def select(self, rows: Any) -> None:
        """Row i is what row rows[i] was."""
        if self.shard is not None:
            self.shard.select(rows)

    def attend(
        self, q: Any, new: tuple[Any, ...], at: int, begins: Any, scoring: Scoring, by_heads: bool
    ) -> tuple[Any, Any]:
        """Attention to all tokens of all ranks, of which those of k and v in `new` are still to be appended.
        by_heads: the result is this rank's heads alone. Collective."""
        if isinstance(self.shard, RemoteLayer):
            both = self.shard.attend(q, new, begins, scoring)
            self.slots += new[0].shape[1] if new else 0
            return both
        if new:
            self.append(*new)
        stands, shard = range(at, at + q.shape[1]), cast("CacheLayer", self.shard)
        v = shard.k[..., : self.rank] if self.rank else shard.v
        given = q, shard.k, v, stands, scoring, shard.lengths, begins
        if not by_heads:
            return self._cache.plans.attend(*given)
        out, lse = self._cache.plans_by_heads.attend(*given)
        own, comm = q.shape[2] // self._cache.comm.size, self._cache.comm
        return tensor_parallel.own_heads(comm, out, 2, own), tensor_parallel.own_heads(comm, lse, 1, own)

    def take(self, latents: Latents | None, first: bool) -> None:
        """Whether latents lie here is what the first chunk of a sequence says. Raises `StateError` for
        others later, as a compiled model has them, or one that was adapted."""
        rank = latents.rank if latents else 0
        if first:
            self.rank = rank
        if rank != self.rank:
            raise StateError(
                "the cache holds latents, which a compiled model cannot go on with, nor one whose kv_b_proj "
                "was adapted or quantized meanwhile: cache.reset() empties it"
                if self.rank
                else "the cache holds keys and values of a compiled model: cache.reset() empties it"
            )

    def is_sharded(self, heads: int) -> bool:
        """Whether so many query heads are this rank's part of all."""
        return tensor_parallel.is_sharded(heads, self._heads, self._cache.comm.size)

    def all_heads(self, *arrays: Any) -> list[Any]:
        """The heads of all ranks. Collective."""
        return tensor_parallel.all_heads(self._cache.comm, *arrays)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    begins: torch.Tensor | None,
    sinks: torch.Tensor | None,
    own: Store | None,
    at: int,
    new: int,
    scoring: Scoring,
    latents: Latents | None = None,
) -> torch.Tensor:
    """out [batch, queries, heads, dim] of the queries at the slots from `at` on.

    begins: of each sequence, counted from the first key, that of the text where `own` has the others.
    own: of a layer, to which k and v are appended if `new`, or the latents that they are made of; None: key
    and value are all there is, and end where the queries do.
    """
    if own is not None:
        own.use()
    q, k, v = as_rows(query), as_rows(key), as_rows(value)
    first = None if begins is None else begins.cpu().numpy()
    if first is not None and not first.any():
        first = None
    by_heads = own is not None and own.is_sharded(q.shape[2])
    added: tuple[Any, ...] = ()
    if own is not None and new and not by_heads:
        own.check_tokens(key, first)
    if own is not None and new:
        own.take(latents, at == 0)
        added = (as_rows(latents.together()),) if latents else (k, v)
        if by_heads:
            added = tuple(own.all_heads(k, v))
    if own is None or at == 0:  # all of it is in k and v: no other rank need be asked
        if own is not None and added:
            own.append(*added)
        stands = range(k.shape[1] - q.shape[1], k.shape[1])
        out, lse = plans.alone().attend(q, k, v, stands, scoring, begins=first)
    else:
        if by_heads:
            q = own.all_heads(q)[0]
        elif latents:
            q = as_rows(latents.turned(query))
        out, lse = own.attend(q, added, at, first, scoring, by_heads)
        if latents:
            out = latents.values(as_tensor(out))
    return finished(out, lse, sinks, query.dtype)


def finished(out: Any, lse: Any, sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """With the sink of each head, which has no value: exp(lse) / (exp(lse) + exp(sink)) of the result."""
    if sinks is None:
        return as_tensor(out).to(dtype, copy=True)  # models keep it, a decoder writes its own again
    share = torch.sigmoid(as_tensor(lse) - sinks.detach().float()[None, :, None])
    return (as_tensor(out) * share.transpose(1, 2)[..., None]).to(dtype)


@torch.library.custom_op("treeattn::attend", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    begins: torch.Tensor | None,
    sinks: torch.Tensor | None,
    store: int,
    at: int,
    new: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    own = _stores[store] if store else None
    return attend(query, key, value, begins, sinks, own, at, new, Scoring(scale, window, softcap))


@_attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    batch, heads, queries, _dim = query.shape
    return query.new_empty((batch, queries, heads, value.shape[3]))
