"""Families of models over a sharded cache have the tokens and logits of transformers' own attention."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (the extra `huggingface`)")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (the extra `huggingface`)"
)

from tests.support.tiny_models import FAMILIES, assert_close, logits_of, made, padded, prompt  # noqa: E402
from treeattn import huggingface  # noqa: E402
from treeattn.errors import ArgumentError  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("default")]

#: Each has something that no other has; the gate takes these, `make test-deep` all.
GATE = (
    *("Llama", "Mistral", "Qwen3-MoE", "Gemma 2", "Gemma 3n", "GPT-OSS", "Phi-3", "Cohere2", "GPT-2"),
    *("DeepSeek-V3", "LFM2"),
)
NAMES = [name if name in GATE else pytest.param(name, marks=pytest.mark.deep) for name in FAMILIES]


@pytest.mark.parametrize("family", NAMES)
def test_a_family_has_the_tokens_and_logits_of_eager(comm, family):
    model = made(family)

    def cache():
        return huggingface.ShardedKV(model.config, comm, capacity=40)

    ids, mask = prompt(3), padded(prompt(3))
    greedy = {"do_sample": False, "max_new_tokens": 6}
    wanted = logits_of(model, ids, transformers.DynamicCache(config=model.config), mask)
    wanted_tokens = model.generate(ids, attention_mask=mask, **greedy)
    wanted_one = model.generate(ids[:1], **greedy)
    model.set_attn_implementation("treeattn")
    assert_close(logits_of(model, ids, cache(), mask), wanted, mask.bool())
    tokens = model.generate(ids, attention_mask=mask, past_key_values=cache(), **greedy)
    assert tokens.tolist() == wanted_tokens.tolist()
    dealt = cache()
    if any(dealt.is_linear):
        with pytest.raises(ArgumentError, match="recurrent layers"):
            huggingface.prefill(model, ids[:1, :-1], dealt)
    else:
        huggingface.prefill(model, ids[:1, :-1], dealt)
        assert model.generate(ids[:1], past_key_values=dealt, **greedy).tolist() == wanted_one.tolist()
