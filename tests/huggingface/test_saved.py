"""A prompt that was computed once is continued by other ranks, and by cache nodes."""

import pytest

from tests.support.tiny_models import made, padded, prompt
from treeattn import cache_nodes, huggingface
from treeattn.errors import ArgumentError
from treeattn.huggingface import plans


@pytest.mark.parametrize("family", ["Llama", "DeepSeek-V3"])
def test_the_text_goes_on_in_another_job(comm, folder, family):
    """All ranks write and each reads for itself, and the other way round; the nodes read it, too."""
    model, ids = made(family), prompt(3)
    given = {"attention_mask": padded(ids), "do_sample": False, "max_new_tokens": 6}
    wanted = model.generate(ids, **given).tolist()
    model.set_attn_implementation("treeattn")
    alone = plans.alone().comm
    for writers, readers in ((comm, alone), (alone, comm)):
        kv = huggingface.ShardedKV(model.config, writers, capacity=9)
        with pytest.raises(ArgumentError, match="the cache is empty"):
            kv.save(folder)
        own = f"{folder}/{comm.rank if writers is alone else 'all'}"
        huggingface.prefill(model, ids[:, :-1], kv, given["attention_mask"][:, :-1])
        kv.save(own)
        comm.barrier()
        if writers is alone:
            own = f"{folder}/0"
        again = huggingface.ShardedKV(model.config, readers, capacity=9)
        with pytest.raises(ArgumentError, match="device 'gpu' is unknown"):  # of one rank, on all
            again.load(own, device="cpu" if readers.rank else "gpu")
        again.load(own)
        assert again.get_seq_length() == 29
        with pytest.raises(ArgumentError, match="29 slots already"):
            again.load(own)
        assert model.generate(ids, past_key_values=again, **given).tolist() == wanted
        comm.barrier()
    other = made("Mistral" if family == "Llama" else "Llama", "treeattn")
    with pytest.raises(ArgumentError, match="all of full attention|this model is 'llama' of 4 layers"):
        huggingface.ShardedKV(other.config, comm, capacity=9).load(f"{folder}/0")
    if comm.size == 1 or comm.library == "torch":
        return
    if comm.rank:
        cache_nodes.serve(comm)
        return
    with cache_nodes.connect(comm) as nodes:
        kv = huggingface.ShardedKV(model.config, capacity=64, nodes=nodes)
        kv.load(f"{folder}/0")
        kv.save(f"{folder}/nodes")
        assert model.generate(ids, past_key_values=kv, **given).tolist() == wanted
