"""Latents of DeepSeek's kind lie in a cache in place of the keys and values of all heads."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers", reason="not installed (the extra `huggingface`)")
torch = pytest.importorskip("torch", reason="not installed (the extra `huggingface`)")

from tests.support.tiny_models import assert_close, logits_of, made, prompt  # noqa: E402
from treeattn import huggingface  # noqa: E402
from treeattn.errors import StateError  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("default")]


def held(cache):
    """Numbers of a token in each layer."""
    arrays = [(layer.store.shard.k, layer.store.shard.v) for layer in cache.layers]
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


@torch.no_grad()
def test_16_bits_are_as_near_as_eager(comm):
    exact, ids = made("DeepSeek-V3"), prompt()
    wanted = eager(exact, ids)
    model = made("DeepSeek-V3", dtype=torch.bfloat16)
    errors = [(eager(model, ids).float() - wanted).abs().mean().item()]
    model.set_attn_implementation("treeattn")
    got = logits_of(model, ids, huggingface.ShardedKV(model.config, comm, capacity=40))
    assert (got.float() - wanted).abs().mean().item() <= 1.5 * errors[0]


@torch.no_grad()
def test_a_compiled_model_does_not_go_on_with_them(comm, monkeypatch):
    model = made("DeepSeek-V3", "treeattn")
    cache = huggingface.ShardedKV(model.config, comm, capacity=40)
    model(prompt(), past_key_values=cache)
    monkeypatch.setattr("treeattn.huggingface.latent.of", lambda *_: None)
    with pytest.raises(StateError, match="latents, which a compiled model cannot go on with"):
        model(prompt(1, 1), past_key_values=cache)
