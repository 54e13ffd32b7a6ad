"""Weights by heads and the cache by tokens, over the same ranks."""

import pytest
import torch

from tests.support.sharded_models import check_tensor_parallel
from tests.support.tiny_models import made, prompt, tensor_parallel
from treeattn.errors import ArgumentError
from treeattn.huggingface import ShardedKV


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("family", "scheme"), [("Llama", None), ("Qwen3", "binary_tree")])
def test_each_rank_has_its_heads_of_the_weights_and_its_tokens_of_the_cache(comm, folder, family, scheme):
    if comm.size != 2:
        pytest.skip("the models have two heads of keys")
    check_tensor_parallel(comm, family, folder, scheme)


@pytest.mark.usefixtures("group")
def test_ranks_that_draw_otherwise_are_told(comm, folder, monkeypatch):
    """Before the weights of all mix what they drew; keys of parts of the heads cannot tell."""
    if comm.size != 2:
        pytest.skip("the models have two heads of keys")
    draw = torch.multinomial
    if comm.rank == 0:
        made("Llama").save_pretrained(folder)
    comm.barrier()
    model = tensor_parallel(folder)
    if comm.rank:
        monkeypatch.setattr(torch, "multinomial", lambda *given, **named: (draw(*given, **named) + 1) % 97)
    cache = ShardedKV(model.config, comm, capacity=64)
    with pytest.raises(ArgumentError, match="ids differs between ranks"):
        model.generate(prompt(2), cache=cache, do_sample=True, max_new_tokens=6)
    assert cache.get_seq_length() == 30
