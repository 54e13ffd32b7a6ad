"""What rules by position cost: python benchmarks/visible.py [--json FILE]

One rank, one query head of 128 elements over one KV head, bfloat16. Each row is a step of a planned
decoder over a cache of so many tokens under a rule, interleaved with all others; "more" is beside a plain
step over as many tokens as the rule leaves. Goal: a window of 4096 over 1 Mi tokens costs what 4096 tokens
cost, plus 5 microseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import harness
import ml_dtypes
import numpy as np
from mpi4py import MPI

import treeattn

LONG, SHORT = 1 << 20, 4096
REPEATS, STEPS = 60, 50

# Name -> (tokens of the cache, rules). What they leave is SHORT tokens, or all of a short cache.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (SHORT, {}),
    "causal": (SHORT, {"causal": True}),
    "window of 4096 in 1 Mi": (LONG, {"causal": True, "window": (SHORT - 1, 0)}),
    "window of 4092 and 4 leading in 1 Mi": (LONG, {"causal": True, "window": (SHORT - 5, 0), "leading": 4}),
    "softcap": (SHORT, {"softcap": 30.0}),
    "alibi": (SHORT, {"alibi": [0.01]}),
    "sink": (SHORT, {"sink_logits": [0.5]}),
}


def stepper(cache: tuple[Any, Any], q: Any, tokens: int, rules: dict[str, Any]) -> Callable[[], object]:
    """A step of a decoder of its own."""
    asks = {"causal", "window", "alibi"} & set(rules)
    decoder = treeattn.Decoder(
        MPI.COMM_SELF,
        heads=1,
        kv_heads=1,
        head_dim=128,
        cache=treeattn.CacheFormat(positions=[(0, 1, tokens)] if asks else None),
        rules=treeattn.Rules(**rules),
    )
    k, v = (one[:, :tokens] for one in cache)
    if not asks:
        return lambda: decoder(q, k, v)
    stands = np.array([tokens - 1])
    return lambda: decoder(q, k, v, q_positions=stands)


def main() -> None:
    options = harness.options(__doc__)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 1, 1, 128), np.float32).astype(ml_dtypes.bfloat16)
    k, v = (rng.standard_normal((1, LONG, 1, 128), np.float32).astype(ml_dtypes.bfloat16) for _ in "kv")
    steps = {name: stepper((k, v), q, *case) for name, case in CASES.items()}
    times = harness.timed(steps, REPEATS, each=STEPS, scale=1e6)
    rows = []
    for name, (tokens, _) in CASES.items():
        more = [own - plain for own, plain in zip(times[name], times["plain"], strict=True)]
        rows.append(
            {
                "case": name,
                "tokens": tokens,
                "median_us": statistics.median(times[name]),
                "fastest_us": min(times[name]),
                "more_us": statistics.median(more),
            }
        )
        print(f"{name:38s} {rows[-1]['median_us']:8.1f} us, {rows[-1]['more_us']:+7.1f} beside plain")
    options.write(harness.source() | {"rows": rows})


if __name__ == "__main__":
    main()
