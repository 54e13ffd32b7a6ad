"""Attention of many rows per KV head on the processor: python benchmarks/many_rows.py [--json FILE]

Goals, one thread: 2048 queries against 2048 keys (head_dim 128, float32) at 80 percent of the rate at which
a core multiplies and adds, and ahead of PyTorch's scaled_dot_product_attention where PyTorch is installed;
under the causal bound 0.6 of that time. Latent attention (keys of 576, values their first 512 channels) of 16
and 128 heads at 60 percent of the slower of reading and arithmetic.

All of a case is timed in turn, in one process; the best of each counts.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
from collections.abc import Callable
from typing import Any

import harness
import ml_dtypes
import numpy as np

from treeattn import partial
from treeattn.attention.mask import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs
from treeattn.backends import cpu
from treeattn.backends.cpu import compile
from treeattn.study import environment
from treeattn.study.roofline.reading import fastest_reader, seconds

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class Arithmetic:
    """The best rate of multiply-adds that one core showed, in numbers per second."""

    def __init__(self) -> None:
        self._kernels = compile.library(compile.chosen_isa())
        self._kernels.multiply_and_add.restype = ctypes.c_int64
        self.rate = 0.0

    def run(self) -> None:
        """A burst as long as a time slice seldom cuts."""
        result, done = ctypes.c_float(0.5), 0

        def burst() -> None:
            nonlocal done
            done = self._kernels.multiply_and_add(ctypes.c_int64(200_000), ctypes.byref(result))

        taken = seconds(burst)
        self.rate = max(self.rate, done / taken)


def best_of(repeats: int, runs: dict[str, Callable[[], object]], arithmetic: Arithmetic) -> dict[str, float]:
    """Seconds of each, all of them in turn, and arithmetic."""
    steps: dict[str, Callable[[], Any]] = {"arithmetic": arithmetic.run}
    steps |= {name: functools.partial(seconds, run) for name, run in runs.items()}
    found = harness.in_turn(steps, repeats)
    return {name: min(found[name]) for name in runs}


def attention(q: Any, k: Any, v: Any, visible: MaskTables | None = None) -> Callable[[], object]:
    """The planned step over these arrays, called once already."""
    records = partial.identity((q.shape[0], q.shape[2], q.shape[1]), v.shape[3])
    planned = cpu.PlannedAttention(records, scale=q.shape[3] ** -0.5, threads=1, tables=visible)
    planned(q, k, v)
    return lambda: planned(q, k, v)


def prefill(tokens: int, heads: int, dtype: str, repeats: int) -> dict[str, Any]:
    """As many queries as keys, head_dim 128; with the causal bound and without."""
    draw = np.random.default_rng(0)
    q, k, v = (draw.standard_normal((1, tokens, heads, 128)).astype(TYPES[dtype]) for _ in "qkv")
    causal = MaskTables(Rules(causal=True), 1, tokens)
    causal.update(Runs([(0, 1, tokens)]), tokens, q_positions=np.arange(tokens))
    runs = {"attention": attention(q, k, v), "causal": attention(q, k, v, causal)}
    if importlib.util.find_spec("torch"):
        runs |= torch_runs(q, k, v, dtype)
    arithmetic = Arithmetic()
    best = best_of(repeats, runs, arithmetic)
    return {
        "tokens": tokens,
        "heads": heads,
        "dtype": dtype,
        "milliseconds": {name: taken * 1e3 for name, taken in best.items()},
        "percent_of_arithmetic": 100 * 2 * tokens**2 * heads * 128 / arithmetic.rate / best["attention"],
        "causal_share": best["causal"] / best["attention"],
        "multiply_add_rate_g_s": arithmetic.rate / 1e9,
    }


def torch_runs(q: Any, k: Any, v: Any, dtype: str) -> dict[str, Callable[[], object]]:
    """The same of PyTorch with one thread, on tensors in the order that it takes."""
    import torch

    torch.set_num_threads(1)
    by_head = [
        torch.from_numpy(np.ascontiguousarray(array.astype(np.float32).swapaxes(1, 2))).to(
            getattr(torch, dtype)
        )
        for array in (q, k, v)
    ]
    attend = torch.nn.functional.scaled_dot_product_attention
    return {"torch": lambda: attend(*by_head), "torch causal": lambda: attend(*by_head, is_causal=True)}


def latent(tokens: int, heads: int, dtype: str, repeats: int) -> dict[str, Any]:
    """One query over one latent head."""
    draw = np.random.default_rng(0)
    q = draw.standard_normal((1, 1, heads, 576), np.float32).astype(TYPES[dtype])
    k = np.resize(
        draw.standard_normal((1, 1024, 1, 576), np.float32).astype(TYPES[dtype]), (1, tokens, 1, 576)
    )
    step, arithmetic, reader = attention(q, k, k[..., :512]), Arithmetic(), fastest_reader(k)
    best = best_of(repeats, {"attention": step, "reading": lambda: reader.read(k, 1)}, arithmetic)
    bound = max(best["reading"], tokens * heads * (576 + 512) / arithmetic.rate)
    return {
        "tokens": tokens,
        "heads": heads,
        "dtype": dtype,
        "milliseconds": {name: taken * 1e3 for name, taken in best.items()},
        "percent_of_bound": 100 * bound / best["attention"],
        "gb_s": k.nbytes / best["attention"] / 1e9,
        "multiply_add_rate_g_s": arithmetic.rate / 1e9,
    }


def one_isa(repeats: int) -> dict[str, Any]:
    cases = [(heads, dtype) for dtype in TYPES for heads in (1, 8) if heads == 1 or dtype == "float32"]
    return {
        "isa": compile.chosen_isa(),
        "prefill": [prefill(2048, heads, dtype, max(2, repeats // heads)) for heads, dtype in cases],
        "latent": [
            latent(tokens, heads, dtype, repeats)
            for dtype in ("bfloat16", "float32")
            for heads, tokens in ((16, 16384), (128, 2048))
        ],
    }


def show(result: dict[str, Any]) -> None:
    print(result["isa"])
    for row in result["prefill"]:
        times = ", ".join(f"{name} {taken:.1f} ms" for name, taken in row["milliseconds"].items())
        print("  prefill {tokens} x {tokens}, {heads} heads, {dtype}:".format(**row), times)
        print("    {percent_of_arithmetic:.0f} % of arithmetic, causal {causal_share:.2f}".format(**row))
    for row in result["latent"]:
        print(
            "  latent, {heads} heads, {tokens} tokens, {dtype}: {percent_of_bound:.0f} % of the bound".format(
                **row
            )
        )


def main() -> None:
    options = harness.options(__doc__, repeats=40, one=False)
    if options.one:
        print(json.dumps(one_isa(options.repeats)))
        return
    results = []
    for result in harness.of_each_isa(compile.available_isas(), "--repeats", options.repeats):
        show(result)
        results.append(result)
    facts = {"software": environment.software(), "machine": harness.machine()}
    options.write(facts | {"results": results})


if __name__ == "__main__":
    main()
