"""Families of models over a sharded cache have the tokens and logits of transformers' own attention."""

import contextlib
import copy

import pytest
import torch
import transformers

from tests.support.cuda_tensors import models_on_gpu
from tests.support.sharded_models import check_family
from tests.support.tiny_models import FAMILIES, logits_of, padded, prompt, wide
from treeattn import huggingface

#: Each has something that no other has; the gate takes these, `make test-deep` all.
GATE = (
    *("Llama", "Mistral", "Qwen3-MoE", "Gemma 2", "Gemma 3n", "GPT-OSS", "Phi-3", "Cohere2", "GPT-2"),
    *("DeepSeek-V3", "LFM2"),
)
NAMES = [name if name in GATE else pytest.param(name, marks=pytest.mark.deep) for name in FAMILIES]


@pytest.mark.parametrize("family", NAMES)
def test_a_family_has_the_tokens_and_logits_of_eager(comm, family):
    check_family(comm, family)


#: On a GPU three of two layers in the gate, and all of GATE with four; 16 bits on processors.
KINDS = "float32", "bfloat16", "float16"
NEAR = [
    *(("cuda", "Llama", "float32", 2), ("cuda", "Llama", "bfloat16", 2), ("cuda", "Mistral", "float16", 2)),
    *(("cuda", "DeepSeek-V3", "bfloat16", 2), ("cpu", "DeepSeek-V3", "bfloat16", 4)),
    ("cpu", "GPT-OSS", "float16", 4),
]
DEEP = [
    ("cuda", name, kind, 4) for name in GATE for kind in KINDS if (name, kind) != ("DeepSeek-V3", "float32")
]  # no kernel for latents of float32
DEEP += [("cpu", "DeepSeek-V3", "float16", 4), ("cpu", "GPT-OSS", "bfloat16", 4)]


@pytest.mark.parametrize(
    ("device", "family", "kind", "layers"),
    [*NEAR, *(pytest.param(*case, marks=pytest.mark.deep) for case in DEEP)],
)
def test_a_family_is_as_near_as_eager(comm, device, family, kind, layers):
    """Prompts padded on the left, chunks, tokens. float32: eager's logits and tokens. 16 bits: the largest
    error to float64 of a prompt, by the prompts' median at most 1.5 times eager's; and eager's tokens
    wherever its two best are further apart than so many, where no last bit may choose another expert."""
    model = wide(family, dtype=getattr(torch, kind), num_hidden_layers=layers)
    ids = prompt(16 if device == "cpu" else 2 * layers - 2, 26)
    mask, real = padded(ids), padded(ids).bool()
    eager = logits_of(model, ids, transformers.DynamicCache(config=model.config), mask)[real].double()
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    rows = [exact(row[seen][None], use_cache=False).logits[0] for row, seen in zip(ids, real, strict=True)]
    exact = torch.cat(rows).detach()
    model.set_attn_implementation("treeattn")
    with models_on_gpu(comm.rank) if device == "cuda" else contextlib.nullcontext() as runtime:
        before = runtime and runtime.launches
        cache = huggingface.ShardedKV(model.config, comm, capacity=16)
        got = logits_of(model, ids, cache, mask)[real].double()
        assert runtime is None or runtime.launches > before
    if kind == "float32":
        assert (got - eager).abs().max() <= 2e-5 * eager.abs().max()
        assert torch.equal(got.argmax(1), eager.argmax(1))
        return
    errors = ((one - exact).abs().amax(1).split([len(row) for row in rows]) for one in (got, eager))
    ours, its = (torch.stack([prompt.max() for prompt in one]) for one in errors)
    assert ours.median() <= 1.5 * its.median()
    if not hasattr(model.config, "num_experts_per_tok"):
        best = eager.topk(2).values
        clear = best[:, 0] - best[:, 1] > 1.5 * its.max()
        assert torch.equal(got.argmax(1)[clear], eager.argmax(1)[clear])
