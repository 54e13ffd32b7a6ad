"""Prompts of all lengths leave few plans behind."""

import pytest
import torch

from tests.support.tiny_models import made, prompt
from treeattn import huggingface
from treeattn.attention.arrays import on_host
from treeattn.decoder import Decoder
from treeattn.errors import ArgumentError
from treeattn.huggingface import plans
from treeattn.huggingface.plans import MOST_LENGTHS, alone


@torch.no_grad()
def test_plans_are_those_of_the_last_lengths_and_of_one_token(comm, monkeypatch):
    closed = []
    close = Decoder.close
    monkeypatch.setattr(
        Decoder, "close", lambda decoder: [closed.append(decoder.shape.queries), close(decoder)]
    )
    model = made(
        "Granite", "treeattn", attention_multiplier=0.21
    )  # whose scale no other test has: the kind is new
    cache = huggingface.ShardedKV(model.config, comm, capacity=40)
    assert repr(cache).endswith(f"rank {comm.rank} of {comm.size}, 0 slots, 0 bytes here)")

    def logits(tokens):
        """Of a first chunk, one that comes behind, and a token."""
        cache.reset()
        chunks = prompt(1, tokens), prompt(1, tokens, seed=4), prompt(1, 1)
        return torch.cat([model(ids, past_key_values=cache).logits for ids in chunks], 1)

    lengths = range(2, MOST_LENGTHS + 5)
    first = logits(2)
    for tokens in lengths:
        logits(tokens)
    kinds = [
        list(planned)
        for one in {cache.plans(), alone()}  # of one rank the same
        for kind, planned in one._decoders.items()
        if 0.21 in kind
    ]
    assert {len([tokens for tokens in kind if tokens > 1]) for kind in kinds if kind != [1]} == {MOST_LENGTHS}
    assert any(1 in kind for kind in kinds)
    assert sorted(closed) == sorted([2, 3, 4] * len({cache.plans(), alone()}))
    assert torch.equal(logits(2), first)


def test_queries_of_several_plans(monkeypatch):
    """Each writes its results to the same place."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 11, heads, 8, generator=random) for heads in (4, 2, 2))
    found = []
    for most in 256, 4:
        monkeypatch.setattr(plans, "MOST_QUERIES", most)
        found.append([one.clone() for one in alone().attend(q, k, v, range(11), plans.Scoring(0.3))])
    assert all(map(torch.allclose, *found))


def test_a_traced_tensor_has_no_memory():
    with pytest.raises(ArgumentError, match="traced by torch.func, and has no memory"):
        torch.func.functionalize(lambda k: on_host("k", k))(torch.ones(1, 1, 2, 8))
