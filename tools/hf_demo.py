"""A model process of transformers that keeps no keys and values, against transformers alone: `make hf-demo`.

mpiexec -n 1 python tools/hf_demo.py MODEL PROMPT_FILE [TOKENS [DEVICE]] : -n 3 treeattn cache-node

Continues the first TOKENS (4096) tokens of the prompt by both, greedily in float32, and compares the texts.
The model computes on DEVICE (cpu or cuda), the nodes hold keys and values in the memory of their hosts.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from treeattn import cache_nodes

NEW = 24


def main() -> int:
    """The exit code: 0 where the texts are the same."""
    nodes = cache_nodes.connect()  # first of all: the nodes wait for it
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from treeattn import huggingface

    folder, prompt = sys.argv[1], Path(sys.argv[2]).read_text()
    tokens = int(sys.argv[3]) if len(sys.argv) > 3 else 4096
    device = sys.argv[4] if len(sys.argv) > 4 else "cpu"
    torch.set_num_threads(1)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")
    ids = tokenizer(prompt, return_tensors="pt").input_ids[:, :tokens].to(device)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.to(device)
    given = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    texts = []
    for name in ("transformers alone", f"{nodes.size} cache nodes"):
        began = time.perf_counter()
        if texts:
            model.set_attn_implementation("treeattn")
            cache = huggingface.ShardedKV(model.config, capacity=tokens + NEW, nodes=nodes)
            out = model.generate(ids, cache=cache, **given)
        else:
            out = model.generate(ids, **given)
        texts.append(out[0, ids.shape[1] :].tolist())
        seconds = time.perf_counter() - began
        print(f"== {name}, {ids.shape[1]} tokens and {NEW} more in {seconds:.0f} s", flush=True)
        print(tokenizer.decode(texts[-1]), flush=True)
    same = texts[0] == texts[1]
    print("the same text" if same else "ANOTHER TEXT")
    nodes.close()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
