"""The attention that transformers calls, registered as "treeattn" with its mask: one operator, also of a
compiled model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from treeattn.errors import ArgumentError, StateError
from treeattn.huggingface import flash, latent, plans
from treeattn.huggingface.fixed import FixedLayer
from treeattn.huggingface.layers import NOT_ATTENDED, SlidingWindowLayer, updated
from treeattn.huggingface.mask import Mask, late_begins, mask
from treeattn.huggingface.plans import Scoring
from treeattn.huggingface.tensors import NO_GRAPH, all_heads, as_rows, finished, of_handle, torchs_stream

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
    attention_mask: Mask | None,
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
    if given is not None:
        given.module = module
    layer, latents = getattr(key, "treeattn", None), None
    cache = getattr(layer or given, "cache", None)
    _refuse(module, attention_mask, dropout, others)
    begins, keys = None, key.shape[2]
    if attention_mask is not None:
        begins, keys = attention_mask.begins, attention_mask.keys
        sliding_window = sliding_window or attention_mask.window
    if layer is None and hasattr(module, "expand_kv"):  # it caches latents, and made key and value of them
        layer = given
        latents = latent.of(module, layer, query, key, value) if layer else None
    if layer is None and given is not None:
        raise StateError(NOT_ATTENDED)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    scoring = Scoring(float(scale), sliding_window or 0, float(softcap or 0.0))
    own, new, end = None, 0, key.shape[2]
    if isinstance(layer, SlidingWindowLayer):
        layer.check_window(sliding_window)
        end = layer.slots
        if layer is layer.cache.first and layer.cache.dealt is None and not torch.compiler.is_compiling():
            at, gone = end - query.shape[2], end - key.shape[2]
            layer.cache.origin.check_padding(late_begins(begins), at, len(key), gone)
    elif layer is not None:
        own, new = layer, int(layer is given)  # others share what was appended
        if not new and layer.module is module:  # maybe to other values
            raise ArgumentError(f"{type(module).__name__} attends twice in a layer: it is not served")
        if isinstance(layer, FixedLayer) and layer.steps(query):
            return layer.step(query, scoring, s_aux), None
        end = layer.slots
    if cache is not None and cache.dealt is not None:
        cache.expect_others(query.device, query.shape[2])
        with torchs_stream(query.device):
            return cache.dealt.attend(own, query, key, value, s_aux, scoring, new, latents), None
    if own is None and keys != key.shape[2] and not torch.compiler.is_compiling():
        raise ArgumentError(
            f"the mask is of {keys} keys, and the cache hands over {key.shape[2]}: make the cache of the "
            "config of this model"
        )
    # As one operator where something wants to trace or to differentiate it; it has no gradient, and says so.
    traced = torch.compiler.is_compiling() or (query.requires_grad and torch.is_grad_enabled())
    if own is not None and not torch.compiler.is_compiling():
        own.latents = latents
    call = torch.ops.treeattn.attend if traced else _attend
    at, number = end - query.shape[2], own.handle if own else 0
    return call(query, key, value, begins, s_aux, number, at, new, *scoring), None


def _refuse(module: Any, attention_mask: Any, dropout: float, others: dict[str, Any]) -> None:
    """Raise `ArgumentError` for what would change the result."""
    if not isinstance(attention_mask, Mask | None):
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


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    begins: torch.Tensor | None,
    sinks: torch.Tensor | None,
    layer: int,
    at: int,
    new: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """out [batch, queries, heads, dim] of the queries at the slots from `at` on.

    begins: of each sequence, counted from the first key, that of the text where `layer` has the others.
    layer: its handle; k and v are appended to it if `new`, or the latents that they are made of; 0: key and
    value are all there is, and end where the queries do.
    """
    own, first, scoring = of_handle(layer), late_begins(begins), Scoring(scale, window, softcap)
    q, k, v = as_rows(query), as_rows(key), as_rows(value)
    by_heads, latents, added = False, None, tuple[Any, ...]()
    if own is not None:
        latents, own.latents = own.latents, None
        by_heads = own.is_part(q.shape[2])
        own.cache.check_step(own, key, first, at, bool(new) and not by_heads)
        if new:
            own.take(latents, at == 0)
            added = (as_rows(latents.together()),) if latents else (k, v)
            if by_heads:
                added = all_heads(own.cache.comm, k, v)
    whole = own is None or at == 0  # all of it is in k and v: no other rank need be asked
    # The first latents are attended to as keys, except on a GPU, which has no kernel of such widths.
    turned = latents if not whole or query.device.type == "cuda" else None
    with torchs_stream(query.device):
        if turned:
            q = as_rows(turned.turned(query))
        if own is None or whole:
            if own is not None and added:
                own.append(*added)
            if turned:
                k, v = added[0], added[0][..., : turned.rank]
            rank = own.cache.comm.rank if own else None
            if q.shape[1] > 1 and flash.serves(q, k, v, scoring, first, rank):
                out, lse = flash.attend(q, k, v, True, scale)
            else:
                stands = range(k.shape[1] - q.shape[1], k.shape[1])
                out, lse = plans.alone().attend(q, k, v, stands, scoring, begins=first)
        else:
            if by_heads:
                q = all_heads(own.cache.comm, q)[0]
            out, lse = own.attend(q, added, at, first, scoring, by_heads)
        if turned:
            out = turned.values(out)
        return finished(out, lse, sinks, query.dtype)


_operator = torch.library.custom_op("treeattn::attend", _attend, mutates_args=(), tags=NO_GRAPH)


@_operator.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    batch, heads, queries, _dim = query.shape
    return query.new_empty((batch, queries, heads, value.shape[3]))


def register() -> None:
    """The attention, and the mask: without it transformers would pass no mask at all, and not say so."""
    AttentionInterface.register("treeattn", attention)
    AttentionMaskInterface.register("treeattn", mask)
