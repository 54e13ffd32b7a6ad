"""Models of transformers whose keys and values lie on cache nodes: the text of transformers alone."""

import pytest
import torch

from tests.support.tiny_models import made, prompt
from treeattn import cache_nodes, huggingface
from treeattn.errors import ArgumentError

WAYS = {
    "greedy": {},
    "padded": {},
    "beams": {"num_beams": 3},
    "return sequences": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "prefill in chunks": {"prefill_chunk_size": 7},
}
OTHERS = "Gemma 2", "GPT-OSS", "Mistral"
CASES = [("Llama", way) for way in WAYS] + [(family, "padded") for family in OTHERS]
CASES += [("DeepSeek-V3", way) for way in ("padded", "beams")]


@pytest.mark.parametrize(("family", "way"), CASES)
def test_the_text_of_transformers_alone(comm, family, way):
    if comm.size == 1 or comm.library == "torch":
        with pytest.raises(ArgumentError, match="mpiexec"):
            cache_nodes.connect(comm)
        return
    if comm.rank:
        cache_nodes.serve(comm)
        return
    given = {"do_sample": False, "max_new_tokens": 12} | WAYS[way]
    with cache_nodes.connect(comm) as nodes:
        model, ids = made(family), prompt(2, 24)
        ids[:, 12:] = ids[:, :12]  # so that prompt lookup finds something
        ids = ids[:1] if way == "prompt lookup" else ids
        if way == "padded":
            given["attention_mask"] = torch.ones_like(ids)
            given["attention_mask"][1, :5] = 0
        torch.manual_seed(11)
        wanted = model.generate(ids, **given)
        model.set_attn_implementation("treeattn")
        for turn in range(2):  # the memory of the first cache is free again
            torch.manual_seed(11)
            cache = huggingface.ShardedKV(model.config, comm, capacity=64, nodes=nodes if turn else True)
            got = model.generate(ids, past_key_values=cache, **given)
            assert got.tolist() == wanted.tolist()
