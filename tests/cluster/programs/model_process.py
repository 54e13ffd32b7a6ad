"""A model process of NumPy alone, whose keys and values lie on cache nodes; writes what it found as JSON."""

import json

import numpy as np

from treeattn import cache_nodes
from treeattn.reference import attention

LAYERS, TOKENS = 2, 20

with cache_nodes.connect() as nodes:
    cache = nodes.cache(layers=LAYERS, kv_heads=2, head_dim=64, dtype="float32", capacity=1000)
    draw, error = np.random.default_rng(0), 0.0
    keys, values = ([np.empty((1, 0, 2, 64), np.float32)] * LAYERS for _ in range(2))
    for _ in range(TOKENS):
        for layer in range(LAYERS):
            q, k, v = (draw.standard_normal((1, 1, heads, 64), np.float32) for heads in (8, 2, 2))
            keys[layer] = np.concatenate([keys[layer], k], 1)
            values[layer] = np.concatenate([values[layer], v], 1)
            out, _ = cache.step(layer, q, k, v)
            wanted, _ = attention(q, keys[layer], values[layer], scale=64**-0.5)
            error = max(error, float(np.abs(out - wanted).max()))
    found = {"nodes": nodes.size, "children": nodes._link.tree.children}
    found |= {"totals": cache.totals.tolist(), "error": error}
print(json.dumps(found))
