"""The attention that transformers calls, registered as "treeattn" with its mask."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from treeattn.errors import ArgumentError, StateError
from treeattn.huggingface import latent
from treeattn.huggingface.layers import updated
from treeattn.huggingface.mask import mask
from treeattn.huggingface.plans import Scoring
from treeattn.huggingface.sealed import NOT_ATTENDED, plain
from treeattn.huggingface.store import attend

#: What models pass along and attention has nothing to do with.
_BESIDE_ATTENTION = {
    "cache_position", "labels", "layer_idx", "logits_to_keep", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "position_embeddings", "position_ids", "return_dict", "token_type_ids",
    "use_cache",
}  # fmt: skip


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """out [batch, queries, heads, dim], as transformers asks an attention implementation for it.

    query, key, value [batch, heads, tokens, dim]: of a `ShardedKV` the new tokens alone, with the layer
    attached that has the others. attention_mask: what `mask` made. Raises `ArgumentError` for what would
    change the result and is not understood.
    """
    last = updated()
    given, last.layer = last.layer, None
    layer, key, latents = getattr(key, "treeattn", None), plain(key), None
    keys = getattr(attention_mask, "keys", None)
    cache = getattr(layer or given, "cache", None)
    waited = None
    if cache is not None:
        waited, cache.waiting = cache.waiting, None
    if attention_mask is not None:
        sliding_window = sliding_window or getattr(attention_mask, "window", None)
        attention_mask = plain(attention_mask)
    _refuse(module, attention_mask, dropout, others)
    if layer is None and hasattr(module, "expand_kv"):  # it caches latents, and made key and value of them
        layer = given if given and given.new == key.shape[2] else None
        latents = latent.of(module, layer, query, key, value) if layer else None
    if layer is None and given is not None:
        raise StateError(NOT_ATTENDED)
    new, tokens, store = 0, query.shape[2], None
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    scoring = Scoring(float(scale), sliding_window or 0, float(softcap or 0.0))
    if layer is None:
        end = key.shape[2]
    else:
        layer.check_window(sliding_window)
        store, end = layer.store, layer.slots
        new = layer.taken(module, layer is waited)
        if layer.cache.dealt is not None:
            return layer.cache.dealt.attend(layer, query, key, value, s_aux, scoring, new, latents), None
    if store is None and keys not in (None, key.shape[2]) and not torch.compiler.is_compiling():
        raise ArgumentError(
            f"the mask is of {keys} keys, and the cache hands over {key.shape[2]}: make the cache of the "
            "config of this model"
        )
    tensors = query, key, value, attention_mask, s_aux
    # As one operator where something wants to trace or to differentiate it; it has no gradient, and says so.
    if torch.compiler.is_compiling() or (query.requires_grad and torch.is_grad_enabled()):
        handle = store.handle if store else 0
        return torch.ops.treeattn.attend(*tensors, handle, end - tokens, new, *scoring), None
    return attend(*tensors, store, end - tokens, new, scoring, latents), None


def _refuse(module: Any, attention_mask: Any, dropout: float, others: dict[str, Any]) -> None:
    """Raise `ArgumentError` for what would change the result."""
    if attention_mask is not None and (attention_mask.ndim != 1 or attention_mask.dtype != torch.int64):
        raise ArgumentError(
            f"attention_mask has {attention_mask.ndim} dimensions when it reaches attention: masks of one's "
            "own are not served, pass [batch, tokens] with zeros for padding on the left"
        )
    if dropout:
        raise ArgumentError("dropout is not served: call model.eval()")
    causal = others.pop("is_causal", None)
    if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
        raise ArgumentError(
            f"attention of {type(module).__name__} is not causal: pass attn_implementation='treeattn' for "
            "the text model alone, {'text_config': 'treeattn'}"
        )
    if others.pop("output_attentions", False):
        raise ArgumentError("output_attentions: treeattn never holds the weights of attention")
    for name, value in others.items():
        if value is not None and name not in _BESIDE_ATTENTION:
            raise ArgumentError(
                f"{name}: treeattn does not know what attention makes of it; it is not served"
            )


def register() -> None:
    """The attention, and the mask: without it transformers would pass no mask at all, and not say so."""
    AttentionInterface.register("treeattn", attention)
    AttentionMaskInterface.register("treeattn", mask)
