"""A compiled model whose steps are one CUDA graph: run by every rank, which may share a GPU.

torchrun --standalone --nproc-per-node 2 tests/gpu/graph_over_ranks.py peer|nccl
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.tiny_models import prompt, wide
from treeattn import huggingface
from treeattn.decoder import Reduction

GREEDY = {"do_sample": False, "max_new_tokens": 12}


def check(transport=None):
    """Eager's tokens, no graph that was left out, and one launch in a step."""
    model, ids = wide("Llama").to("cuda"), prompt(2).to("cuda")
    wanted = model.generate(ids, **GREEDY)
    model.set_attn_implementation("treeattn")
    cache = huggingface.ShardedKV(
        model.config, capacity=64, scheme=Reduction(transport=transport), fixed=True
    )
    huggingface.prefill(model, ids[:, :-1], cache)
    counters = torch._dynamo.utils.counters
    counters.clear()
    model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    assert model.generate(ids, cache=cache, **GREEDY).tolist() == wanted.tolist()
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1
    cache.crop(-4)
    slots = cache.get_seq_length()
    step = wanted[:, slots : slots + 1].clone()
    with torch.no_grad(), torch.profiler.profile() as profile:
        model(step, cache=cache)
    launched = [
        one.name for one in profile.events() if one.name.startswith(("cudaGraphLaunch", "cuGraphLaunch"))
    ]
    assert len(launched) == 1, launched
    assert cache.get_seq_length() == slots + 1


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    os.environ.setdefault("NCCL_HOSTID", f"rank{rank}")
    torch.distributed.init_process_group("gloo")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    check(sys.argv[1])
    torch.distributed.barrier()
    print(f"rank {rank}: one graph")
