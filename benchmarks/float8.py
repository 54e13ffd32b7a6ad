"""8-bit caches against bfloat16 on the processor: python benchmarks/float8.py [--json FILE]

One thread, head_dim 128, 65536 tokens, queries of bfloat16. Goal at one query head per KV head: 1.4 times as
fast as bfloat16. At four arithmetic binds. Types take turns: all meet the same moments of the machine.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

import harness
import ml_dtypes
import numpy as np

from treeattn.backends import cpu
from treeattn.backends.cpu import compile

HEAD_DIM, TOKENS = 128, 65536
TYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
HEADS = ((16, 16), (32, 8))


def planned(name: str, heads: int, kv_heads: int) -> Any:
    """A step over a cache of one type, which is drawn once and repeated."""
    draw = np.random.default_rng(heads)
    dtype = np.dtype(getattr(ml_dtypes, name))
    q = draw.standard_normal((1, 1, heads, HEAD_DIM)).astype(ml_dtypes.bfloat16)
    few = draw.standard_normal((2, 1, 256, kv_heads, HEAD_DIM)).astype(dtype)
    k, v = (np.tile(one, (1, TOKENS // 256, 1, 1)) for one in few)
    records = np.empty((1, heads, 1, HEAD_DIM + 2), np.float32)
    scales = None if name == "bfloat16" else [0.5] * kv_heads
    attention = cpu.PlannedAttention(records, scale=HEAD_DIM**-0.5, k_scale=scales, v_scale=scales)
    return lambda: attention(q, k, v)


def measure(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for heads, kv_heads in HEADS:
        steps = {name: planned(name, heads, kv_heads) for name in TYPES}
        times = harness.timed(steps, rounds)
        for name in TYPES:
            faster = [slow / fast for slow, fast in zip(times["bfloat16"][1:], times[name][1:], strict=True)]
            rows.append(
                {
                    "dtype": name,
                    "group": heads // kv_heads,
                    "tokens": TOKENS,
                    "best_ms": round(1e3 * min(times[name]), 2),
                    "median_ms": round(1e3 * statistics.median(times[name]), 2),
                    "best_against_bfloat16": round(min(times["bfloat16"]) / min(times[name]), 2),
                    "median_of_ratios": round(statistics.median(faster), 2),
                }
            )
    return rows


def main() -> None:
    options, builds = harness.options(__doc__, rounds=25), {}
    for isa in compile.available_isas()[:2]:
        os.environ["TREEATTN_ISA"] = isa
        builds[isa] = measure(options.rounds)
        harness.show(builds[isa], f"{isa}: ")
    options.write(harness.source() | {"builds": builds})


if __name__ == "__main__":
    main()
