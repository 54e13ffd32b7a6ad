"""Layers of a `ShardedKV`, as transformers asks layers of a cache for lengths, crops and orders."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from treeattn.errors import ArgumentError, StateError
from treeattn.huggingface.sealed import NOT_ATTENDED, sealed
from treeattn.huggingface.store import Store

if TYPE_CHECKING:
    from treeattn.huggingface.cache import ShardedKV


class _Updated:
    """The layer that was given new tokens last, until something attends."""

    layer: FullAttentionLayer | None = None


class _UpdatedHere(threading.local, _Updated):
    """One for each thread."""


_eager, _traced = _UpdatedHere(), _Updated()


def updated() -> _Updated:
    """What tells of the layer of keys that cannot say it themselves, since a model made them of latents. Of a
    compiled model the tracer, which is one thread's at a time, has it: locals of threads it does not know."""
    return _traced if torch.compiler.is_compiling() else _eager


class FullAttentionLayer(CacheLayerMixin):
    """Full attention: each token lies on one rank. Attention appends what `update` is given."""

    is_sliding, is_croppable, supports_early_init = False, True, False

    def __init__(self, cache: ShardedKV, heads: int | None) -> None:
        super().__init__()
        self.cache, self.store, self.slots, self.new = cache, Store(cache, heads), 0, 0
        self.module, self.given = cast("Any", None), cast("tuple[torch.Tensor, ...]", ())

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is held here: the store makes its arrays with the first tokens."""
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """The new keys, with this layer attached, and values. Attention then takes and appends them."""
        cache = self.cache
        if cache.waiting is not None:
            raise StateError(NOT_ATTENDED)
        new = key_states.shape[2]
        if not torch.compiler.is_compiling():
            self._check_whole(new if cache.dealt is None else cache.dealt.tokens)
        cache.waiting = updated().layer = self
        self.is_initialized = True
        self.new = new
        if cache.latent and not torch.compiler.is_compiling():
            self.given = key_states, value_states
        self.slots += self.new if cache.dealt is None else cache.dealt.tokens
        return self._on_the_way(key_states), value_states

    def _check_whole(self, new: int) -> None:
        """Raise `StateError` where an earlier call ended between two layers, or between `update` and
        attention."""
        first = self.cache.layers[self.cache.first]
        if self.slots != self.store.slots or (self is not first and self.slots + new != first.slots):
            raise StateError("the cache was left half filled by a call that failed: cache.reset() empties it")

    def _on_the_way(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys are all that transformers hands from a cache to an attention function, also to layers that
        share them: this layer is attached. Latents, of which the model makes keys first, stay open."""
        return keys if self.cache.latent else sealed(keys, treeattn=self)

    def taken(self, module: Any, waited: bool) -> int:
        """Whether what the attention of `module` is given has still to be appended, since it `waited`; that
        of another layer may share it, and comes later. Raises `ArgumentError` where one attends twice, maybe
        to other values."""
        if waited:
            self.module = module
            return 1
        if self.module is module:
            raise ArgumentError(f"{type(module).__name__} attends twice in a layer: it is not served")
        return 0

    def check_window(self, window: int | None) -> None:
        """All tokens are there for any window."""

    def get_seq_length(self) -> int:
        """Slots of the whole sequence, on whichever ranks."""
        return self.slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots of the next step, and where they begin."""
        return self.slots + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is no window, and no last slot."""
        return -1

    def reset(self) -> None:
        """Forget all tokens."""
        self.crop(-self.slots)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget so many of the last slots, given as a negative number."""
        if tokens_to_remove > 0:
            raise ArgumentError(f"crop({tokens_to_remove}): a negative number of tokens to remove is needed")
        self.slots = max(0, self.slots + tokens_to_remove)
        self.store.crop(self.slots)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on with what row beam_idx[i] was."""
        self.store.select(beam_idx.cpu().numpy())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Row i goes on with what row indices[i] was."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one after the other."""
        if self.store.shard is not None:
            self.store.select(np.repeat(np.arange(len(self.store.shard.totals)), repeats))


class SlidingWindowLayer(DynamicSlidingWindowLayer):
    """A sliding window: transformers' own layer, whole on every rank."""

    store = None

    def __init__(self, cache: ShardedKV, heads: int | None, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self.cache = cache

    @property
    def slots(self) -> int:
        """Slots of the whole sequence, those that left the window among them."""
        return int(self.cumulative_length)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """What is in the window of the new tokens, with this layer attached."""
        dealt = self.cache.dealt
        if dealt is None:
            keys, values = super().update(key_states, value_states)
            return sealed(keys, treeattn=self), values
        kept = dealt.tokens if self.record_past else min(dealt.tokens, self.sliding_window)
        super().update(dealt.last(key_states, kept), dealt.last(value_states, kept))
        self.cumulative_length = dealt.tokens
        return sealed(key_states, treeattn=self), value_states

    def taken(self, _module: Any, _waited: bool) -> int:
        """Nothing is to be appended."""
        return 0

    def check_window(self, window: int | None) -> None:
        """Raise `ArgumentError` where attention has another one and tokens are gone: the cache was made for
        another model."""
        if window != self.sliding_window < self.slots:
            raise ArgumentError(
                f"a layer attends with a window of {window}, its cache has one of {self.sliding_window}: "
                "make the cache of the config of this model"
            )
