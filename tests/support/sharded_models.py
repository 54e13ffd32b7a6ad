"""What a model over a sharded cache is held to, whoever started its ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from tests.support.tiny_models import assert_close, logits_of, made, padded, prompt, tensor_parallel
from treeattn import huggingface
from treeattn.errors import ArgumentError

_GREEDY = {"do_sample": False, "max_new_tokens": 6}

#: Ways of generate(): what it is given.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "padded": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "beams": {"num_beams": 3},
    "beam sampling": {"do_sample": True, "num_beams": 3},
    "return sequences": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "assistant": {"assistant_model": "a smaller one"},
    "repetition penalty": {"repetition_penalty": 1.3},
    "prefill in chunks": {"prefill_chunk_size": 7},
}


def way_of(family: str, way: str, batch: int = 2) -> tuple[torch.Tensor, dict[str, Any]]:
    """Ids in which prompt lookup finds something, and what goes with them to a model of this family."""
    ids, given = prompt(batch, 24), {"do_sample": False, "max_new_tokens": 12} | WAYS[way]
    ids[:, 12:] = ids[:, :12]
    if way == "assistant":
        given["assistant_model"] = made(family, num_hidden_layers=2, layer_types=None)
    if way in ("prompt lookup", "assistant"):
        ids = ids[:1]  # of transformers: one sequence
    return ids, given | ({"attention_mask": padded(ids)} if way == "padded" else {})


def check_text(
    model: Any, ids: torch.Tensor, cache: Callable[[Any], Any], seed: int = 0, **given: Any
) -> Any:
    """generate() has the text of eager over the cache that is made of the model's configuration, and that is
    returned. seed: added to that of transformers' own draws."""
    torch.manual_seed(11)
    wanted = model.generate(ids, **given).tolist()
    model.set_attn_implementation("treeattn")
    torch.manual_seed(11 + seed)
    kept = cache(model.config)
    assert model.generate(ids, cache=kept, **given).tolist() == wanted
    return kept


def check_family(comm: Any, family: str) -> None:
    """The tokens and logits of eager: rows padded on the left, chunks, generate(), a prefill dealt out; also
    over transformers' own caches, whose windows hand over the last keys alone."""
    model = made(family)

    def cache() -> Any:
        return huggingface.ShardedKV(model.config, comm, capacity=40)

    ids, mask = prompt(3), padded(prompt(3))
    wanted = logits_of(model, ids, transformers.DynamicCache(config=model.config), mask)
    wanted_tokens = model.generate(ids, attention_mask=mask, **_GREEDY)
    wanted_one = model.generate(ids[:1], **_GREEDY)
    model.set_attn_implementation("treeattn")
    dealt = cache()
    assert_close(logits_of(model, ids, cache(), mask), wanted, mask.bool())
    for own in (transformers.DynamicCache(config=model.config), transformers.DynamicCache()):
        if own.layers or not any(dealt.is_linear):
            assert_close(logits_of(model, ids, own, mask), wanted, mask.bool())
    static = transformers.StaticCache(config=model.config, max_cache_len=40)
    if all(static.is_sliding):  # and full from the first chunk on
        assert_close(logits_of(model, ids, static, mask), wanted, mask.bool())
    else:
        with pytest.raises(ArgumentError, match="room that is not filled yet"):
            logits_of(model, ids, static, mask)
    tokens = model.generate(ids, attention_mask=mask, past_key_values=cache(), **_GREEDY)
    assert tokens.tolist() == wanted_tokens.tolist()
    if any(dealt.is_linear):
        with pytest.raises(ArgumentError, match="recurrent layers"):
            huggingface.prefill(model, ids[:1, :-1], dealt)
    else:
        huggingface.prefill(model, ids[:1, :-1], dealt)
        assert model.generate(ids[:1], past_key_values=dealt, **_GREEDY).tolist() == wanted_one.tolist()


def check_tensor_parallel(comm: Any, family: str, folder: Any, scheme: Any = None) -> None:
    """Each rank has its heads of the weights and its tokens of the cache. folder: the same on every rank."""
    whole = made(family)
    if comm.rank == 0:
        whole.save_pretrained(folder)
    comm.barrier()
    model = tensor_parallel(folder)
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert getattr(weight, "to_local", lambda: weight)().shape[0] == 64 // comm.size
    cache = huggingface.ShardedKV(model.config, comm, capacity=64, scheme=scheme)
    got = model.generate(prompt(2), past_key_values=cache, **_GREEDY)
    assert got.tolist() == whole.generate(prompt(2), **_GREEDY).tolist()
    cache.save(f"{folder}/cache")
    cache.reset()
    cache.load(f"{folder}/cache")  # each rank compares its part of the weights
    again = model.generate(got, past_key_values=cache, **_GREEDY)
    assert again.tolist() == whole.generate(got, **_GREEDY).tolist()
    held = max(layer.shard.lengths.max() for layer in cache.layers)
    assert held <= -(-41 // comm.size)
    with pytest.raises(ArgumentError, match="leave the prefill to generate"):
        huggingface.prefill(model, prompt(2), huggingface.ShardedKV(model.config, comm, capacity=64))
