"""What a model over a sharded cache is held to, whoever started its ranks."""

from typing import Any

import pytest
import transformers

from tests.support.tiny_models import assert_close, logits_of, made, padded, prompt, tensor_parallel
from treeattn import huggingface
from treeattn.errors import ArgumentError

_GREEDY = {"do_sample": False, "max_new_tokens": 6}


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
