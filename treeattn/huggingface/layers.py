"""Layers of a `ShardedKV`, as transformers asks layers of a cache for lengths, crops and orders, and what of
them lies on cache nodes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from treeattn.errors import ArgumentError, StateError
from treeattn.huggingface.plans import Scoring
from treeattn.huggingface.tensors import as_tensor, handle_of

if TYPE_CHECKING:
    from treeattn.cache.sharded import CacheLayer
    from treeattn.cache_nodes import RemoteCache
    from treeattn.huggingface.cache import ShardedKV
    from treeattn.huggingface.latent import Latents

NOT_ATTENDED = (
    "keys and values were cached, and 'treeattn' did not attend to them: the model does not go through "
    "transformers' attention interface, has another attn_implementation, or changed the keys on the way"
)

HALF_FILLED = "the cache was left half filled by a call that failed: cache.reset() empties it"


class _Updated:
    """The layer that was given new tokens last, until something attends or another call begins; and the cache
    for which transformers makes a mask next."""

    def __init__(self) -> None:
        self.layer: FullAttentionLayer | None = None
        self.masked: ShardedKV | None = None


class _UpdatedHere(threading.local, _Updated):
    """One for each thread."""


_eager, _traced = _UpdatedHere(), _Updated()


def updated() -> _Updated:
    """What tells of the layer of keys that cannot say it themselves, since a model made them of latents. Of a
    compiled model the tracer, which is one thread's at a time, has it: locals of threads it does not know."""
    return _traced if torch.compiler.is_compiling() else _eager


def check_behind_the_first(layer: Any, new: int) -> None:
    """Raise `StateError` where an earlier call ended between the first layer of the cache and this one, which
    is to have `new` more slots."""
    first = layer.cache.first
    if layer is not first and layer.slots + new != first.slots:
        raise StateError(HALF_FILLED)


def carrying(layer: Any, keys: torch.Tensor) -> torch.Tensor:
    """Keys are all that transformers hands from a cache to an attention function, also to layers that share
    them: `layer` is attached."""
    keys = keys.view(keys.shape)
    keys.treeattn = layer  # type: ignore[attr-defined]
    return keys


class FullAttentionLayer(DynamicLayer):
    """Full attention: each token lies on one rank. Attention appends what `update` is given."""

    supports_early_init = False  # arrays are made with the first tokens

    def __init__(self, cache: ShardedKV, config: Any) -> None:
        super().__init__()
        self.cache, self.heads = cache, getattr(config, "num_attention_heads", None)
        self.width = [getattr(config, name, None) for name in ("head_dim", "num_key_value_heads")]
        self.shard = cast("CacheLayer | RemoteLayer | None", None)
        self.kind = cast("tuple[Any, ...]", ())  # of what the shard takes
        self.slots = self.held = 0  # told of, and appended
        self.module = cast("Any", None)  # whose attention came for what `update` was given last
        self.given = cast("tuple[torch.Tensor, ...]", ())  # latents that `update` was given last
        self.latents = cast("Latents | None", None)  # of which the keys are made that attention has now
        self.rank = 0  # of the latents that lie here in place of keys and values
        self.first = cast("list[torch.Tensor] | None", None)  # token's latents, and what was made of them
        self.handle = handle_of(self)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """The new keys, with this layer attached, and values. Attention then takes and appends them. Latents,
        of which the model makes keys first, cannot say whose they are."""
        cache = self.cache
        cache.check_attended()
        tokens = key_states.shape[2] if cache.dealt is None else cache.dealt.tokens
        if not torch.compiler.is_compiling():
            self.check_whole(tokens)
            self.module = None
            if cache.latent:
                self.given = key_states, value_states
        updated().layer = self
        self.slots += tokens
        return key_states if cache.latent else carrying(self, key_states), value_states

    def check_whole(self, new: int = 0) -> None:
        """Raise `StateError` where an earlier call ended between two layers, or between `update` and
        attention, which may never have come."""
        if self.slots != self.held:
            raise StateError(HALF_FILLED if self.module else NOT_ATTENDED)
        check_behind_the_first(self, new)

    def get_seq_length(self) -> int:
        """Slots of the whole sequence, on whichever ranks."""
        return self.slots

    def reset(self) -> None:
        self.crop(-self.slots)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget so many of the last slots, given as a negative number."""
        if tokens_to_remove > 0:
            raise ArgumentError(f"crop({tokens_to_remove}): a negative number of tokens to remove is needed")
        slots = max(0, self.slots + tokens_to_remove)
        if slots > self.held:
            raise StateError(HALF_FILLED)
        if self.shard is not None:
            self.shard.rollback(np.full_like(self.shard.totals, slots))
        self.slots = self.held = slots

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on with what row beam_idx[i] was."""
        if self.shard is not None:
            self.shard.select(beam_idx.cpu().numpy())

    def rows(self) -> int:
        """How many there are, 0 before the first tokens."""
        return 0 if self.shard is None else len(self.shard.totals)

    def append(self, k: Any, v: Any = None, tokens: int | None = None) -> None:
        """Add the next tokens, [batch, tokens, kv_heads, dim], of which this rank keeps its own; of latents
        no v. tokens: how many, where k and v are this rank's of them."""
        v_dim = self.rank if v is None else v.shape[3]
        kind, shard = (k.shape[2:], v_dim, v is None, k.dtype), self.shard
        if shard is None or ((kind != self.kind or len(shard.totals) != len(k)) and not self.held):
            self.cache.make_shards(self, k, v_dim, kind)
        made = cast("CacheLayer", self.shard)
        if tokens is None:
            made.append(k, v)
        else:
            made.append_own(k, v, [tokens] * len(k))
        self.held += k.shape[1] if tokens is None else tokens

    def hold(self, shard: CacheLayer | RemoteLayer, slots: int, rank: int) -> None:
        """Go on with what was saved."""
        self.shard, self.rank = shard, rank
        self.slots = self.held = slots

    def attend(
        self, q: Any, new: tuple[Any, ...], at: int, begins: Any, scoring: Scoring, by_heads: bool
    ) -> tuple[Any, ...]:
        """Attention to all tokens of all ranks, of which those of k and v in `new` are still to be appended.
        by_heads: the result is this rank's heads alone. Collective."""
        if isinstance(self.shard, RemoteLayer):
            both = self.shard.attend(q, new, begins, scoring)
            self.held += new[0].shape[1] if new else 0
            return both
        if new:
            self.append(*new)
        stands, shard, cache = range(at, at + q.shape[1]), cast("CacheLayer", self.shard), self.cache
        v = shard.k[..., : self.rank] if self.rank else shard.v
        cache.expect_others(q.device, q.shape[1])
        attend = cache.plans(by_heads).attend
        out, lse = attend(q, shard.k, v, stands, scoring, shard.lengths, begins)
        if by_heads and out.shape[2] == q.shape[2]:  # the scheme has left all of them
            count = q.shape[2] // cache.comm.size
            own = slice(cache.comm.rank * count, (cache.comm.rank + 1) * count)
            return out[:, :, own], lse[:, own]
        return out, lse

    def take(self, latents: Latents | None, first: bool) -> None:
        """Whether latents lie here is what the first chunk of a sequence says. Raises `StateError` for
        others later, as a compiled model has them, or one that was adapted."""
        rank = latents.rank if latents else 0
        if first:
            self.rank = rank
        if rank != self.rank:
            raise StateError(
                f"the cache holds {'latents' if self.rank else 'keys and values'}, the model now others: it "
                "was compiled, or its kv_b_proj adapted or quantized meanwhile; cache.reset() empties it"
            )

    def is_part(self, heads: int) -> bool:
        """Whether so many query heads are this rank's part of all, as of weights that are tensor parallel:
        then all come together, which is little for a token, attend to this rank's tokens, and the result is
        left to each rank by its heads. Raises `ArgumentError` for another part."""
        size = self.cache.comm.size
        if self.heads is None or heads == self.heads:
            return False
        if heads * size != self.heads:
            raise ArgumentError(
                f"this rank has {heads} of {self.heads} query heads, and the cache {size} ranks: the weights "
                "must be tensor parallel over the ranks of the cache, or on none"
            )
        return True


class SlidingWindowLayer(DynamicSlidingWindowLayer):
    """A sliding window: transformers' own layer, whole on every rank."""

    def __init__(self, cache: ShardedKV, config: Any) -> None:
        super().__init__(config.sliding_window)
        self.cache = cache

    @property
    def slots(self) -> int:
        """Slots of the whole sequence, those that left the window among them."""
        return int(self.cumulative_length)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """What is in the window of the new tokens, with this layer attached."""
        dealt = self.cache.dealt
        if dealt is None:
            if self.rows() not in (0, len(key_states)):
                raise ArgumentError(
                    f"the cache holds {self.rows()} texts, these are {len(key_states)}: reset() it"
                )
            if not torch.compiler.is_compiling():
                check_behind_the_first(self, key_states.shape[2])
            keys, values = super().update(key_states, value_states)
            return carrying(self, keys), values
        kept = dealt.tokens if self.record_past else min(dealt.tokens, self.sliding_window)
        super().update(dealt.last(key_states, kept), dealt.last(value_states, kept))
        self.cumulative_length = dealt.tokens
        return carrying(self, key_states), value_states

    def rows(self) -> int:
        """How many there are, 0 before the first tokens."""
        return len(self.keys) if self.is_initialized else 0

    def check_window(self, window: int | None) -> None:
        """Raise `ArgumentError` where attention has another one and tokens are gone: the cache was made for
        another model."""
        if window != self.sliding_window < self.slots:
            raise ArgumentError(
                f"a layer attends with a window of {window}, its cache has one of {self.sliding_window}: "
                "make the cache of the config of this model"
            )


class RemoteLayer:
    """Layer `number` of a cache. transformers crops and reorders layer by layer, the nodes all at once: the
    first layer says it for all."""

    def __init__(self, cache: RemoteCache, number: int) -> None:
        self.cache, self._number = cache, number

    @property
    def totals(self) -> Any:
        """Tokens of each sequence, int64 [batch]."""
        return self.cache.totals[self._number]

    def append(self, k: Any, v: Any = None, counts: Any = None) -> None:
        """Add the next tokens of each sequence."""
        self.cache.append(self._number, k.cpu(), None if v is None else v.cpu())

    append_own = append  # rank 0 has all of them

    def rollback(self, totals: Any) -> None:
        """Forget all but the first `totals` tokens of each sequence."""
        if self._number == 0:
            self.cache.rollback(totals)

    def select(self, rows: Any) -> None:
        """Go on with these sequences."""
        if self._number == 0:
            self.cache.select(rows)

    def attend(self, q: Any, new: tuple[Any, ...], begins: Any, scoring: Scoring) -> tuple[Any, ...]:
        """Attention to all tokens, of which k and v in `new` come with q."""
        how: dict[str, Any] = {"begins": begins, "scale": scoring.scale, "rules": scoring.rules()}
        both = self.cache.step(self._number, *(one.cpu() for one in (q, *new)), **how)
        return tuple(as_tensor(one).to(q.device) for one in both)
