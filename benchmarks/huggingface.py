"""A token of a model by transformers alone (sdpa) and over a sharded cache, in turn in one process:

    OMP_NUM_THREADS=1 [mpiexec -n 2] python benchmarks/huggingface.py MODEL_FOLDER [--json FILE]

Goals on one rank: attention with its cache at most 0.45 of sdpa's, the whole token at most 0.8. The caches
hold drawn keys and values; both take turns token by token, timed by the clock and by the processor.
"""

from __future__ import annotations

import functools
import os
import statistics
import time

import harness
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from treeattn import huggingface
from treeattn.huggingface.attention import attention
from treeattn.huggingface.layers import FullAttentionLayer, updated
from treeattn.mpi import communicators

spent: dict[str, list[float]] = {}


def counted(name, call):
    """`call`, whose time of the clock and of the processor is added up."""

    def timed(*given, **more):
        wall, processor = time.perf_counter(), time.process_time()
        result = call(*given, **more)
        sums = spent.setdefault(name, [0.0, 0.0])
        sums[0] += time.perf_counter() - wall
        sums[1] += time.process_time() - processor
        return result

    return timed


def filled(config, cache, tokens):
    """The cache with drawn keys and values, the same on every rank."""
    for layer in range(config.num_hidden_layers):
        torch.manual_seed(layer)
        k, v = torch.randn(2, 1, config.num_key_value_heads, tokens, config.head_dim)
        cache.update(k, v, layer)
        if isinstance(cache, huggingface.ShardedKV):  # attention would append them
            cache.waiting = updated().layer = None
            cache.layers[layer].append(k.transpose(1, 2).numpy(), v.transpose(1, 2).numpy())
    return cache


def main() -> None:
    options = harness.options(__doc__, "model", tokens=4096, steps=30)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    AttentionInterface.register("treeattn", counted("attention", attention))
    AttentionInterface.register("plain", counted("attention", sdpa_attention_forward))
    AttentionMaskInterface.register("plain", sdpa_mask)
    for kind in (FullAttentionLayer, DynamicLayer):
        kind.update = counted("update", kind.update)
    comm = communicators.world()
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation="treeattn"
    ).eval()
    kv = huggingface.ShardedKV(model.config, comm, capacity=options.tokens + options.steps)
    contenders = {"treeattn": filled(model.config, kv, options.tokens)}
    if comm.size == 1:
        contenders["plain"] = filled(model.config, DynamicCache(config=model.config), options.tokens)
    token = dict.fromkeys(contenders, torch.tensor([[7]]))
    said = {name: [] for name in contenders}

    def step(name):
        model.set_attn_implementation(name)
        spent.clear()
        logits = counted("token", model)(token[name], cache=contenders[name]).logits
        token[name] = logits[:, -1].argmax(-1)[:, None]
        said[name].append(int(token[name]))
        both = [sum(pair) for pair in zip(spent["attention"], spent["update"], strict=True)]
        return *spent["token"], *both, *spent["update"]

    with torch.inference_mode():
        steps = {name: functools.partial(step, name) for name in contenders}
        rows = harness.in_turn(steps, options.steps - 3, warm=3)
    assert len({(*tokens,) for tokens in said.values()}) == 1
    names = ("token", "token_processor", "attention", "attention_processor", "update", "update_processor")
    found = {
        name: {
            what: {"fastest_ms": 1e3 * min(column), "median_ms": 1e3 * statistics.median(column)}
            for what, column in zip(names, zip(*steps, strict=True), strict=True)
        }
        for name, steps in rows.items()
    }
    if comm.rank:
        return
    for name, times in found.items():
        words = [f"{what} {t['fastest_ms']:.2f}/{t['median_ms']:.2f}" for what, t in times.items()]
        print(f"{name}, {comm.size} ranks, {options.tokens} tokens, ms fastest/median:", ", ".join(words))
    if "plain" in found:
        for what in names[:4]:
            at = names.index(what)
            pairs = zip(rows["treeattn"], rows["plain"], strict=True)
            ratio = statistics.median(ours[at] / its[at] for ours, its in pairs)
            found.setdefault("ratios", {})[what] = round(ratio, 3)
        print("treeattn / plain, median of pairs:", found["ratios"])
    facts = {"ranks": comm.size, "tokens": options.tokens, "threads": torch.get_num_threads()}
    options.write(harness.source() | facts | {"load": os.getloadavg()[0], "found": found})


if __name__ == "__main__":
    main()
