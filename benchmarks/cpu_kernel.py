"""The processor's kernels against its limits: python benchmarks/cpu_kernel.py [--json FILE]

Goals, one thread, head_dim 128, 65536 tokens, every type of cache: 90 percent of what one core reads
at one query head per KV head, 60 percent at four. Two partials of 16 heads merge within 1 microsecond,
call included.
"""

from __future__ import annotations

import json
from typing import Any

import harness
import ml_dtypes
import numpy as np

from treeattn import partial
from treeattn.backends import cpu
from treeattn.backends.cpu import compile
from treeattn.study import environment, roofline


def best_microseconds(run: Any, calls: int, repeats: int = 500) -> float:
    return min(harness.seconds(run, calls) for _ in range(repeats)) * 1e6


def small_calls() -> dict[str, float]:
    """Microseconds of calls where overhead counts: 16 heads, head_dim 128, one query, bfloat16."""
    records = partial.identity((1, 16, 1), 128)
    out, lse = np.empty((1, 1, 16, 128), np.float32), np.empty((1, 16, 1), np.float32)
    draw = np.random.default_rng(0)
    q, k, v = (draw.standard_normal((1, n, 16, 128)).astype(ml_dtypes.bfloat16) for n in (1, 64, 64))
    attention = cpu.PlannedAttention(records, scale=0.1)
    attention(q, k, v)
    other = records.reshape(16, 130).copy()
    other[:, 0] -= 1
    merge = cpu.MergeOperator(128).planned_merge(records.reshape(16, 130), other)
    none = k[:, :0]
    return {
        "merge of 16 x 128": best_microseconds(merge, 100),
        "finish of 16 x 128": best_microseconds(cpu.planned_finish(records, out, lse), 100),
        "attention over 0 tokens, same arrays": best_microseconds(lambda: attention(q, none, none), 100),
        "attention over 64 tokens, same arrays": best_microseconds(lambda: attention(q, k, v), 10),
        "attention over 64 tokens, new views": best_microseconds(lambda: attention(q, k[:, :], v[:, :]), 10),
    }


def one_isa(repeats: int, threads: list[int]) -> dict[str, Any]:
    return {
        "isa": compile.chosen_isa(),
        "roofline": roofline.measure(repeats=repeats, threads=threads),
        "microseconds": small_calls(),
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['isa']}: one core reads {result['roofline']['read_rate_gb_s']:.1f} GB/s")
    for row in result["roofline"]["rows"]:
        print(
            "  {dtype:9s} {group} query heads per KV head, {threads} threads: {gb_s:5.1f} GB/s, "
            "{percent_of_read_rate:4.0f} % of one core's reading, "
            "{percent_of_bound:4.0f} % of the bound".format(**row)
        )
    for name, value in result["microseconds"].items():
        print(f"  {name}: {value:.2f} us")


def main() -> None:
    threads = {"type": int, "nargs": "+", "default": [1], "help": "more needs an idle machine"}
    options = harness.options(__doc__, repeats=15, threads=threads, one=False)
    if options.one:
        print(json.dumps(one_isa(options.repeats, options.threads)))
        return
    software, results = environment.software(), []
    words = ("--repeats", options.repeats, "--threads", *options.threads)
    for result in harness.of_each_isa(compile.available_isas(), *words):
        show(result)
        results.append(result)
    options.write({"software": software, "machine": harness.machine(), "results": results})


if __name__ == "__main__":
    main()
