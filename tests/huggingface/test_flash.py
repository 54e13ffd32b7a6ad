"""Prompts that torch's kernel attends to, block by block: our merge joins what it gives. On processors it is
dense here."""

import copy

import numpy as np
import pytest
import torch

from tests.support.cuda_tensors import plain
from tests.support.tiny_models import padded, prompt, wide
from treeattn import Prefill, huggingface
from treeattn.decoder import gpu_reducers
from treeattn.huggingface import flash
from treeattn.shards import parse_layout

CALLS = []


def varlen_attn(
    query, key, value, ends_q, ends_k, max_q, max_k, *, return_aux, scale, window_size, enable_gqa
):
    """In torch's place, for queries and keys of one length in all rows: lse is [heads, queries of all]."""
    assert (return_aux.lse, window_size[0], enable_gqa) == (True, -1, query.shape[1] != key.shape[1])
    for ends, most in (ends_q, max_q), (ends_k, max_k):
        assert (plain(ends).diff() == most).all()
    assert max_q > 1 or window_size[1] == 0  # else FlashAttention-2 gives the lse of other heads
    CALLS.append((max_q, max_k))
    rows = ((query, max_q), (key, max_k), (value, max_k))
    q, k, v = (plain(one).double().unflatten(0, (-1, most)).transpose(1, 2) for one, most in rows)
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    logits = q @ k.mT * scale
    if window_size[1] == 0:
        logits = logits.masked_fill(torch.ones(max_q, max_k).triu(1 + max_k - max_q).bool(), -torch.inf)
    out, lse = (logits.softmax(3) @ v).transpose(1, 2).flatten(0, 1), logits.logsumexp(3)
    return out.to(query), lse.transpose(0, 1).flatten(1).to(query.device, torch.float32)


@pytest.fixture
def varlen(monkeypatch):
    flash._tried.cache_clear()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    gpu_reducers.say.cache_clear()
    CALLS.clear()
    yield CALLS
    flash._tried.cache_clear()


@pytest.mark.parametrize("layout", ["contiguous", "interleaved", "zigzag"])
@pytest.mark.parametrize("tokens", [7, 12, 3])
def test_blocks_of_another_kernel_are_merged(comm, varlen, layout, tokens):
    """Whose ranks have as many tokens as one another, or one more; of a zigzag some blocks are ours."""
    draw = np.random.default_rng(5).standard_normal
    whole = [draw((2, tokens, heads, 16), np.float32) for heads in (4, 2, 2)]
    runs = parse_layout(layout).runs(tokens, comm.rank, comm.size)
    own = np.concatenate([np.arange(tokens)[run] for run in runs])
    q, k, v = (one[:, own] for one in whole)
    how = {"tokens": len(own), "heads": 4, "kv_heads": 2, "head_dim": 16, "batch": 2, "dtype": "float32"}
    with Prefill(comm, positions=layout, scale=0.3, **how) as planned:
        wanted = [one.copy() for one in planned(q, k, v)]
        planned.block_kernel = flash.block_kernel(torch.float32, 0.3)
        got = planned(q, k, v)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)
    seen = [layout != "contiguous" or rank <= comm.rank for rank in range(comm.size)]
    assert len(varlen) <= sum(seen) if layout == "zigzag" or tokens == 3 else len(varlen) == sum(seen)


@pytest.mark.parametrize("wrong", ["axes", "scale", "groups", "rows"])
def test_a_kernel_that_gives_something_else_is_not_believed(varlen, monkeypatch, wrong):
    def other(q, k, v, *ends, enable_gqa, scale, **how):
        if wrong in ("groups", "rows"):
            k, v = (one[:, [0, 1, 0, 1]] if wrong == "groups" else one[:4].repeat(2, 1, 1) for one in (k, v))
        scale, grouped = 0.25 if wrong == "scale" else scale, wrong != "groups"
        out, lse = varlen_attn(q, k, v, *ends, enable_gqa=grouped, scale=scale, **how)
        return out, lse.view(4, 2, 3).transpose(0, 1) if wrong == "axes" else lse

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", other)
    assert "gives something else" in flash._tried(torch.device("cpu"), torch.float16, 16)


@pytest.mark.parametrize(("family", "kind"), [("Llama", "bfloat16"), ("GPT-OSS", "float16")])
@torch.no_grad()
def test_prompts_are_as_near_as_eagers(comm, gpu, varlen, capfd, family, kind):
    """Of which generate() has all on each rank, and `prefill` a part; layers of windows are ours."""
    model = wide(family, dtype=getattr(torch, kind), num_hidden_layers=2, layer_types=["full_attention"] * 2)
    ids = prompt(2, 20)
    eager, exact = (one(ids, use_cache=False).logits for one in (model, copy.deepcopy(model).float()))
    model.set_attn_implementation("treeattn")
    cache = huggingface.ShardedKV(model.config, comm, capacity=32)
    got = [model(ids, cache=cache).logits]
    cache.reset()
    huggingface.prefill(model, ids[:, :-1], cache)
    got.append(model(ids[:, -1:], cache=cache).logits)
    for one in got:
        ours, its = (each[:, -one.shape[1] :] - exact[:, -one.shape[1] :] for each in (one, eager))
        assert ours.abs().max() <= 1.5 * its.abs().max()
    assert len(varlen) == 1 + 2 + 2 * comm.size  # tried, the whole of two layers, their blocks
    assert capfd.readouterr().err.count("prompts attend by torch.nn.attention.varlen\n") == (comm.rank == 0)


@torch.no_grad()
def test_what_it_does_not_serve_is_ours(comm, gpu, varlen, monkeypatch, capfd):
    """And a line says why."""
    model = wide("Llama", "treeattn", torch.float16, num_hidden_layers=1)
    problem = "FlashAttention only supports Ampere GPUs or newer.\n"

    def refuses(*_, **__):
        raise RuntimeError(problem + "and more")

    def said(**given):
        gpu_reducers.say.cache_clear()
        flash._tried.cache_clear()
        model(prompt(2, 9), cache=huggingface.ShardedKV(model.config, comm, capacity=16), **given)
        return capfd.readouterr().err

    for made, reason in (None, "TypeError"), (refuses, f"RuntimeError: {problem}"):
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", made)
        assert (reason in said()) == (comm.rank == 0)
    assert ("padding" in said(attention_mask=padded(prompt(2, 9)))) == (comm.rank == 0)
