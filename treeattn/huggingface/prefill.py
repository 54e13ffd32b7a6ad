"""A prefill that is dealt out: each rank computes its own tokens of the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from treeattn.agreement import Agreement
from treeattn.errors import ArgumentError
from treeattn.huggingface import plans
from treeattn.huggingface.mask import begins_of
from treeattn.huggingface.store import finished
from treeattn.huggingface.tensors import as_rows, digest

if TYPE_CHECKING:
    from treeattn.huggingface.cache import ShardedKV

__all__ = ["prefill"]


def prefill(
    model: Any, ids: torch.Tensor, cache: ShardedKV, attention_mask: torch.Tensor | None = None
) -> None:
    """Cache all tokens of a prompt, each rank its own: every p-th on each of p ranks. Collective.

    Then ``model.generate(ids and at least one more, past_key_values=cache)`` goes on from there.

    Parameters
    ----------
    model
        Whose config the cache was made for.
    ids : int64 [batch, tokens]
        The same on every rank.
    cache : ShardedKV
        Empty.
    attention_mask : [batch, tokens], optional
        Zeros where rows are padded on the left.

    Raises
    ------
    ArgumentError
        On every rank alike: a cache that is not empty, layers with a recurrent state (which need every token
        in turn), fewer tokens than ranks, other ids on another rank.
    """
    comm, tokens = cache.comm, ids.shape[1]
    with Agreement(comm) as agreed:
        if model.config.get_text_config(decoder=True)._attn_implementation != "treeattn":
            raise ArgumentError("load the model with attn_implementation='treeattn'")
        if getattr(model, "tp_size", None) not in (None, 1):
            raise ArgumentError(
                "weights that are tensor parallel compute every token on all ranks: leave the prefill to "
                "generate()"
            )
        if cache.get_seq_length():
            raise ArgumentError(
                f"the cache has {cache.get_seq_length()} slots already: a prefill comes first"
            )
        if any(cache.is_linear):
            raise ArgumentError(
                "this model has recurrent layers, which need every token in turn: leave the prefill to "
                "generate()"
            )
        if tokens < comm.size:
            raise ArgumentError(f"{tokens} tokens for {comm.size} ranks: leave the prefill to generate()")
        begins = None if attention_mask is None else begins_of(attention_mask, tokens)
        agreed.must_match = {
            "ids": digest(ids),
            "attention_mask": None if begins is None else begins.tolist(),
        }
    own = torch.arange(comm.rank, tokens, comm.size)
    places = own[None] if begins is None else (own[None] - begins[:, None]).clamp(0)
    cache.dealt = Dealt(comm, tokens, begins)
    try:
        with torch.no_grad():
            model(ids[:, own], position_ids=places, past_key_values=cache, use_cache=True, logits_to_keep=1)
    finally:
        cache.dealt = None


class Dealt:
    """A prefill of `tokens` tokens under way: what a layer computed on its rank, and attention of it to
    all."""

    def __init__(self, comm: Any, tokens: int, begins: torch.Tensor | None) -> None:
        self.tokens, self._comm = tokens, comm
        self._begins = None if begins is None or not begins.any() else begins.cpu().numpy()

    def together(self, own: torch.Tensor) -> torch.Tensor:
        """[batch, heads, own tokens, dim] of all ranks, in the order of the sequence. Collective."""
        whole = own.new_empty((*own.shape[:2], self.tokens, own.shape[3]))
        for rank, part in enumerate(self._comm.allgather(own.detach().cpu())):
            whole[:, :, rank :: self._comm.size] = part
        return whole

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float | None,
        window: int,
        softcap: float,
        new: int,
    ) -> torch.Tensor:
        """Of this rank's queries to what stands before them on all ranks."""
        if layer.store:
            if new:
                layer.store.append_own(as_rows(key), as_rows(value), self.tokens)
            key, value = self.together(key), self.together(value)
        out, lse = plans.alone().attend(
            *(as_rows(query), as_rows(key), as_rows(value)),
            range(self._comm.rank, self.tokens, self._comm.size),
            begins=self._begins,
            scale=query.shape[3] ** -0.5 if scale is None else scale,
            window=window,
            softcap=softcap,
            causal=True,
        )
        return finished(out, lse, sinks, query.dtype)
