"""What transformers builds for a mask: here where each sequence begins, and an error for every other pattern.

A mask function of transformers gets no cache and no layer. It is given a rule by slots, `mask_function`, in
which images, packed sequences and chunks come too: it has to be looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from treeattn.errors import ArgumentError, StateError
from treeattn.huggingface.layers import updated
from treeattn.huggingface.tensors import NO_GRAPH, refuse

#: Slots that are looked at at once.
_BLOCK = 256


class Mask:
    """What `mask` made. begins int64 [batch]: the first of the keys of each sequence that is no padding, or
    None; window: the slots that a query sees, None for all; keys: how many of them the cache hands over."""

    ndim = 1  # at which transformers looks where a mask is given to a mask function

    def __init__(self, begins: torch.Tensor | None, window: int | None, keys: int) -> None:
        self.begins, self.window, self.keys = begins, window, keys

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        """Raise `StateError`: torch calls it where something else computes with it."""
        raise StateError(
            "something else than 'treeattn' computed with its mask: the model does not go through "
            "transformers' attention interface"
        )


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = False,
    config: Any = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **_: Any,
) -> Mask | None:
    """What `attention` takes for a mask. Keys are counted from the first that the cache hands over, which of
    a window is not the first of the text: here alone both are known. The window comes along, since some
    models tell it the mask alone; None in a compiled model where no row is padded and no query has a window.

    Raises `ArgumentError` for a pattern that is neither causal nor a causal window, for padding on the right,
    and for a cache with room that is not filled.
    """
    traced, known, last = torch.compiler.is_compiling(), None, updated()
    cache, last.masked = last.masked, None
    if traced and cache and isinstance(q_offset, torch.Tensor):  # of a cache of fixed room
        if attention_mask is not None and q_length == 1:
            refuse(
                "a cache of fixed room has no padding: leave attention_mask out of a compiled model's steps"
            )
        q_offset = cache.full[0].slots if q_length > 1 else 0  # of one query the host does not know
        kv_length = q_offset + q_length
    if not traced:
        last.layer = None  # of a call that failed
        known = cache.origin.known_begins(int(q_offset)) if cache and cache.ids_agreed else None
    again = isinstance(attention_mask, Mask)
    if again or isinstance(q_offset, torch.Tensor) or kv_offset + kv_length != q_offset + q_length:
        raise ArgumentError(
            "the cache has room that is not filled yet (a static cache): pass a "
            "treeattn.huggingface.ShardedKV instead"
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and local_size == chunk:
        raise ArgumentError("attention in chunks (attention_chunk_size) is not served")
    if mask_function is not causal_mask_function:
        plain = allow_is_causal_skip and not use_vmap
        if traced and not plain:
            refuse("a mask of the model's own cannot be looked at in a compiled model")
        if not traced:
            first = q_length - 1 if plain else 0
            how = {"mask_function": mask_function, "use_vmap": use_vmap, "device": "cpu" if plain else device}
            _check(batch_size, first, q_length, q_offset, local_size, how)
    begins = None
    if attention_mask is not None:
        found = torch.ops.treeattn.begins if traced else _begins
        end = q_offset + q_length
        begins = found(attention_mask, end, kv_offset) if known is None else (known - kv_offset).clamp(min=0)
    elif traced and not local_size:
        return None
    return Mask(begins, local_size, kv_length)


def begins_of(attention_mask: torch.Tensor, end: int) -> torch.Tensor:
    """The first slot of each row that is no padding, `end` of a row that is nothing else so far, on the host:
    a GPU is waited for once, not in each layer. Raises `ArgumentError` for padding elsewhere."""
    seen = attention_mask[:, :end].bool().cpu()
    if attention_mask.ndim != 2 or seen.shape[1] != end:
        raise ArgumentError(
            f"attention_mask has shape {list(attention_mask.shape)}: [batch, {end}], all slots so far, is "
            "needed"
        )
    begins = torch.where(seen.any(1), seen.int().argmax(1), end)
    wrong = seen.sum(1) != end - begins
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        if bool(seen[row, -1]):
            slot = int(begins[row] + (~seen[row, int(begins[row]) :]).int().argmax())
            raise ArgumentError(
                f"attention_mask of row {row} has a zero inside the text, at slot {slot}: cut the token out; "
                "only what stands before a text can be masked"
            )
        raise ArgumentError("attention_mask has zeros after ones: pad on the left (padding_side='left')")
    return begins


def late_begins(begins: torch.Tensor | None) -> Any:
    """int64 [batch], or None where no sequence begins later than the first key."""
    return None if begins is None or not begins.any() else begins.numpy()


def _begins(attention_mask: torch.Tensor, end: int, gone: int) -> torch.Tensor:
    """`begins_of`, counted from slot `gone` on."""
    return (begins_of(attention_mask, end) - gone).clamp(min=0)


_operator = torch.library.custom_op("treeattn::begins", _begins, mutates_args=(), tags=NO_GRAPH)


@_operator.register_fake
def _(attention_mask: torch.Tensor, end: int, gone: int) -> torch.Tensor:
    return torch.empty(attention_mask.shape[0], dtype=torch.int64)


def _check(
    batch: int, first: int, queries: int, offset: int, window: int | None, how: dict[str, Any]
) -> None:
    """Raise `ArgumentError` unless the rule that `how` says is causal, or a causal window, from query `first`
    on."""
    for begin in range(first, queries, _BLOCK):
        count = min(_BLOCK, queries - begin)
        end = offset + begin + count
        got = sdpa_mask(
            batch_size=batch,
            q_length=count,
            kv_length=offset + queries,
            q_offset=offset + begin,
            kv_offset=0,
            allow_is_causal_skip=False,
            **how,
        )
        q = torch.arange(end - count, end, device=got.device)[:, None]
        kv = torch.arange(offset + queries, device=got.device)[None]
        wanted = (kv <= q) & (True if window is None else kv > q - window)
        if not bool((got == wanted).all()):
            raise ArgumentError(
                "the mask of this model is neither causal nor a causal window (images, packed sequences, "
                "chunks): it is not served"
            )
