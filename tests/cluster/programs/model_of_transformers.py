"""A tiny model of transformers over a sharded cache, or with the word `nodes` over cache nodes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from treeattn import cache_nodes

nodes = cache_nodes.connect() if sys.argv[1:] == ["nodes"] else False

from tests.support.tiny_models import made, prompt  # noqa: E402
from treeattn import huggingface  # noqa: E402

model, ids, greedy = made("Llama"), prompt(), {"do_sample": False, "max_new_tokens": 10}
wanted = model.generate(ids, **greedy)
model.set_attn_implementation("treeattn")
cache = huggingface.ShardedKV(model.config, capacity=64, nodes=nodes)
got = model.generate(ids, past_key_values=cache, **greedy)
print("the same text" if got.tolist() == wanted.tolist() else "another text", flush=True)
