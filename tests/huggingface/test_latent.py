"""Latents of DeepSeek's kind lie in a cache in place of the keys and values of all heads."""

import pytest
import torch
import transformers

from tests.support.tiny_models import assert_close, logits_of, made, prompt
from treeattn import huggingface
from treeattn.errors import ArgumentError, StateError


def held(cache):
    """Numbers of a token in each layer."""
    arrays = [(layer.shard.k, layer.shard.v) for layer in cache.layers]
    return {sum(one.shape[2] * one.shape[3] for one in both if one is not None) for both in arrays}


def eager(model, ids):
    return logits_of(model, ids, transformers.DynamicCache(config=model.config))


def test_what_lies_there_is_latents(comm):
    """24 numbers of a token instead of the 128 of 4 heads; again after a reset."""
    model, ids = made("DeepSeek-V3"), prompt(2)
    wanted = eager(model, ids)
    model.set_attn_implementation("treeattn")
    cache = huggingface.ShardedKV(model.config, comm, capacity=40)
    for _ in range(2):
        assert_close(logits_of(model, ids, cache), wanted)
        assert held(cache) == {24}
        cache.reset()
    huggingface.prefill(model, ids[:, :-1], cache)
    assert held(cache) == {24}


class Doubled(torch.nn.Linear):
    """As a quantized or adapted layer: the weight alone does not say what comes out."""

    def forward(self, states):
        return 2 * super().forward(states)


def doubled_by_class(layer):
    layer.__class__ = Doubled


def doubled_by_hook(layer):
    layer.register_forward_hook(lambda _, given, out: 2 * out)


@pytest.mark.parametrize("doubled", [doubled_by_class, doubled_by_hook])
def test_keys_that_are_made_otherwise_lie_there_themselves(comm, doubled):
    """What the first chunk of a sequence shows decides, not the name of a layer."""
    model, ids = made("DeepSeek-V3"), prompt(2)
    for layer in model.model.layers:
        doubled(layer.self_attn.kv_b_proj)
    wanted = eager(model, ids)
    model.set_attn_implementation("treeattn")
    cache = huggingface.ShardedKV(model.config, comm, capacity=40)
    assert_close(logits_of(model, ids, cache), wanted)
    assert held(cache) == {128}


class Switched(torch.nn.Module):
    """A LoRA of a layer, on or off."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.active_adapters = base_layer, ["default"]

    def forward(self, states):
        return self.base_layer(states) * (1.1 if self.active_adapters else 1.0)


@torch.no_grad()
@pytest.mark.parametrize("turn", ["switched", "put on", "merged"])
def test_an_adapter_of_what_makes_keys_of_latents(comm, turn):
    """transformers makes all keys anew by what is active: merged weights do so here, of latents."""
    model, ids = made("DeepSeek-V3"), prompt(2)
    layers = [layer.self_attn for layer in model.model.layers]
    if turn == "switched":
        for layer in layers:
            layer.kv_b_proj = Switched(layer.kv_b_proj)
    model.set_attn_implementation("treeattn")
    cache = huggingface.ShardedKV(model.config, comm, capacity=40)
    own = transformers.DynamicCache(config=model.config)
    for held in cache, own:
        model(ids[:, :20], past_key_values=held)
    model(ids[:, 20:21], past_key_values=cache)
    model(ids[:, 20:21], past_key_values=own)
    for layer in layers:
        if turn == "switched":
            layer.kv_b_proj.active_adapters = []
        elif turn == "put on":
            layer.kv_b_proj = Switched(layer.kv_b_proj)
        else:
            layer.kv_b_proj.weight *= 1.1
    if turn == "merged":
        got = model(ids[:, 21:], past_key_values=cache).logits
        model.set_attn_implementation("eager")
        assert_close(got, model(ids[:, 21:], past_key_values=own).logits)
        return
    error, match = {
        "switched": (ArgumentError, "makes other keys of a token than before"),
        "put on": (StateError, "adapted or quantized meanwhile"),
    }[turn]
    with pytest.raises(error, match=match):
        model(ids[:, 21:], past_key_values=cache)


class ByRange(torch.nn.Linear):
    """Quantized by the range of all tokens that it is given."""

    def forward(self, states):
        step = states.abs().max() / 127
        return super().forward((states / step).round() * step)


class ByToken(torch.nn.Linear):
    """By that of each."""

    def forward(self, states):
        step = states.abs().amax(-1, keepdim=True) / 127
        return super().forward((states / step).round() * step)


def test_latents_that_are_quantized(comm):
    """transformers rounds all of them anew with each token, by the range of all: no cache of keys can."""
    for kind in ByToken, ByRange:
        model, ids = made("DeepSeek-V3"), prompt(2)
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.__class__ = kind
        wanted = eager(model, ids)
        model.set_attn_implementation("treeattn")
        cache = huggingface.ShardedKV(model.config, comm, capacity=40)
        if kind is ByToken:
            assert_close(logits_of(model, ids, cache), wanted)
        else:
            with pytest.raises(ArgumentError, match="quantized by the range of all: not served"):
                logits_of(model, ids, cache)
