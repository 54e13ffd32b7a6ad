"""A prefill that is dealt out: each rank computes its own tokens of the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from treeattn.decoder import Prefill
from treeattn.errors import ArgumentError
from treeattn.huggingface import flash
from treeattn.huggingface.mask import begins_of, late_begins
from treeattn.huggingface.plans import Scoring
from treeattn.huggingface.tensors import as_rows, as_tensor, finished
from treeattn.mpi.communicators import Agreement

if TYPE_CHECKING:
    from treeattn.huggingface.cache import ShardedKV
    from treeattn.huggingface.latent import Latents


def prefill(
    model: Any, ids: torch.Tensor, cache: ShardedKV, attention_mask: torch.Tensor | None = None
) -> None:
    """Cache all tokens of a prompt, each rank its own: every p-th on each of p ranks. Collective.

    Then ``model.generate(ids and at least one more, cache=cache)`` goes on from there.

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
        The same on every rank: a cache that is not empty, layers with a recurrent state (which need every
        token in turn), fewer tokens than ranks, other ids on another rank.

    Examples
    --------
    >>> config = LlamaConfig(vocab_size=32, hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
    >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="treeattn")
    >>> cache, ids = huggingface.ShardedKV(model.config, capacity=64), torch.arange(16)[None]
    >>> huggingface.prefill(model, ids[:, :-1], cache)
    >>> model.generate(ids, cache=cache, max_new_tokens=2, min_new_tokens=2).shape
    torch.Size([1, 18])
    """
    with cache.during():
        _prefill(model, ids, cache, attention_mask)


def _prefill(model: Any, ids: torch.Tensor, cache: ShardedKV, attention_mask: torch.Tensor | None) -> None:
    comm, tokens = cache.comm, ids.shape[1]
    with Agreement(comm):
        text = model.config.get_text_config(decoder=True)
        if text._attn_implementation != "treeattn":
            raise ArgumentError("load the model with attn_implementation='treeattn'")
        slots, parts = cache.get_seq_length(), getattr(model, "tp_size", None) or 1
        for problem, found in {
            "weights that are tensor parallel compute every token on all ranks": parts > 1,
            "keys made of latents have no kernel on a GPU": cache.latent and ids.device.type == "cuda",
            f"the cache has {slots} slots already: a prefill comes first": slots,
            "this model has recurrent layers, which need every token in turn": any(cache.is_linear),
            f"{tokens} tokens for {comm.size} ranks": tokens < comm.size,
        }.items():
            if found:
                raise ArgumentError(f"{problem}: leave the prefill to generate()")
        begins = None if attention_mask is None else begins_of(attention_mask, tokens)
        cache.check_fixed(tokens, late_begins(begins))
        own = torch.arange(comm.rank, tokens, comm.size)
        places = own[None] if begins is None else (own[None] - begins[:, None]).clamp(0)
        length = tokens if begins is None else tokens - int(begins.min())
        if _frequencies(text, int(places.max()) + 1) != _frequencies(text, length):
            raise ArgumentError(
                "the rotary frequencies of this model depend on the length of the text, of which ranks see "
                "different parts: leave the prefill to generate()"
            )
    mask = torch.ones_like(ids) if begins is None else attention_mask
    cache.origin.begin(cache, model, ids, mask, dealt=True)
    dealt = cache.dealt = Dealt(comm, tokens, begins)
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # rings are not traced
            model(
                ids[:, own], position_ids=places.to(ids.device), use_cache=True, logits_to_keep=1, cache=cache
            )
    finally:
        cache.dealt = None
    cache.check_attended()
    dealt.close()
    cache.origin.tell(ids, tokens)


def _frequencies(config: Any, length: int) -> list[int]:
    """Which ones rotate the keys of a text of this length, for each kind of layers whose depend on it."""
    given = getattr(config, "rope_parameters", None) or {}
    chosen = []
    for rope in [given] if "rope_type" in given else given.values():
        if rope["rope_type"] == "longrope":
            chosen.append(int(length > rope["original_max_position_embeddings"]))
        elif "dynamic" in rope["rope_type"]:
            chosen.append(max(length, config.max_position_embeddings))
    return chosen


class Dealt:
    """A prefill of `tokens` tokens under way: of each layer, attention of its own tokens to those of all
    ranks by a ring, planned once for the layers of a kind."""

    def __init__(self, comm: Any, tokens: int, begins: torch.Tensor | None) -> None:
        self.tokens, self._comm = tokens, comm
        self._begins = late_begins(begins)
        self._planned: dict[Any, Prefill] = {}

    def last(self, own: torch.Tensor, count: int) -> torch.Tensor:
        """[batch, heads, count, dim] of all ranks, the last of the sequence in its order. Collective."""
        first, size = self.tokens - count, self._comm.size
        cuts = [max(0, -(-(first - rank) // size)) for rank in range(size)]
        mine = own.detach()[:, :, cuts[self._comm.rank] :].cpu()
        last = own.new_empty((*own.shape[:2], count, own.shape[3]))
        for rank, (cut, part) in enumerate(zip(cuts, self._comm.allgather(mine), strict=True)):
            last[:, :, rank + size * cut - first :: size] = part
        return last

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        scoring: Scoring,
        new: int,
        latents: Latents | None,
    ) -> torch.Tensor:
        """Attention of this rank's queries to all tokens before them, on all ranks."""
        q, k, v = as_rows(query), as_rows(key), as_rows(value)
        if new:
            layer.take(latents, True)
            given = (as_rows(latents.together()),) if latents else (k, v)
            layer.append(*given, tokens=self.tokens)
        kind = scoring, q.shape, k.shape, v.shape, q.dtype
        if kind not in self._planned:
            how: Any = {"heads": q.shape[2], "kv_heads": k.shape[2], "batch": len(q), "tokens": q.shape[1]}
            how |= {"head_dim": q.shape[3], "v_dim": v.shape[3], "dtype": q.dtype, "device": q.device}
            how |= {"scale": scoring.scale, "rules": scoring.rules(), "positions": "interleaved"}
            self._planned[kind] = made = Prefill(self._comm, **how)
            if flash.serves(q, k, v, scoring, self._begins, self._comm.rank):
                made.block_kernel = flash.block_kernel(q.dtype, scoring.scale)
        out, lse = map(as_tensor, self._planned[kind](q, k, v, begins=self._begins))
        return finished(out, lse, sinks, query.dtype)

    def close(self) -> None:
        """Give the plans back. Collective."""
        for planned in self._planned.values():
            planned.close()
