"""A cache in pages against one in a row, on the processor: python benchmarks/paged.py [--json FILE]

One thread, head_dim 128, 65536 tokens in pages of 64; all results have the same bits. Goal: within 5 percent
of the time over a cache in a row. "in_order": pages in the order of memory, where only the kernel's way to a
row differs. "shuffled": in any order, in which memory itself is read more slowly: "read_shuffled" is what
bare reading of the pages, one after the other, loses. All take turns; of a thread's processor time.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import harness
import ml_dtypes
import numpy as np

from treeattn.backends import cpu
from treeattn.backends.cpu import compile
from treeattn.study import environment
from treeattn.study.roofline.reading import Reader, fastest_reader, seconds

HEAD_DIM, TOKENS, PAGE_SIZE = 128, 65536, 64
PAGES = TOKENS // PAGE_SIZE
TYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
# Query heads and KV heads.
HEADS = ((8, 8), (32, 8), (1, 1))


def steps(name: str, heads: int, kv_heads: int) -> dict[str, Callable[[], object]]:
    """A step over a cache in a row, and over the same in pages; the pages are read, too."""
    draw = np.random.default_rng(heads)
    q = draw.standard_normal((1, 1, heads, HEAD_DIM)).astype(ml_dtypes.bfloat16)
    few = draw.standard_normal((2, 1, 256, kv_heads, HEAD_DIM)).astype(TYPES[name])
    k, v = (np.tile(one, (1, TOKENS // 256, 1, 1)) for one in few)
    in_order, shuffled = np.arange(PAGES, dtype=np.int32), draw.permutation(PAGES).astype(np.int32)
    tables = in_order[None], shuffled[None]
    pages = [one.reshape(PAGES, PAGE_SIZE, kv_heads, HEAD_DIM) for one in (k, v)]
    moved = [np.empty_like(one) for one in pages]
    for into, one in zip(moved, pages, strict=True):
        into[shuffled] = one
    records = [np.empty((1, heads, 1, HEAD_DIM + 2), np.float32) for _ in range(3)]
    lengths = np.array([TOKENS])
    scales = [0.5] * kv_heads if name.startswith("float8") else None
    plan: dict[str, Any] = {"scale": HEAD_DIM**-0.5, "k_scale": scales, "v_scale": scales}
    row, first, second = (cpu.PlannedAttention(one, **plan) for one in records)
    runs: dict[str, Callable[[], object]] = {
        "row": lambda: row(q, k, v, lengths),
        "in_order": lambda: first(q, *pages, lengths, tables[0]),
        "shuffled": lambda: second(q, *moved, lengths, tables[1]),
    }
    for run in runs.values():
        run()
    assert len({one.tobytes() for one in records}) == 1, "pages change no bit"
    reader = fastest_reader(k)
    return runs | {
        "read_in_order": reading(reader, moved, in_order),
        "read_shuffled": reading(reader, moved, shuffled),
    }


def reading(reader: Reader, caches: list[Any], order: Any) -> Callable[[], object]:
    """Reads pages one by one."""
    read = compile.library(reader.isa).read_memory
    size, numbers = ctypes.c_int64(caches[0][0].nbytes), [ctypes.c_int32(n) for n in (1, *reader[1:])]
    places = [ctypes.c_void_p(one[page].ctypes.data) for page in order for one in caches]

    def run() -> None:
        for place in places:
            read(place, size, *numbers)

    return run


def measure(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for heads, kv_heads in HEADS:
        for name in TYPES:
            runs = {
                where: functools.partial(seconds, run) for where, run in steps(name, heads, kv_heads).items()
            }
            times = harness.in_turn(runs, rounds)
            row: dict[str, Any] = {"dtype": name, "kv_heads": kv_heads, "group": heads // kv_heads}
            row |= {f"best_ms_{where}": round(1e3 * min(taken), 3) for where, taken in times.items()}
            for where, base in (("in_order", "row"), ("shuffled", "row"), ("read_shuffled", "read_in_order")):
                row[f"ratio_{where}"] = round(min(times[where]) / min(times[base]), 3)
            rows.append(row)
    return rows


def main() -> None:
    options, builds = harness.options(__doc__, rounds=40), {}
    facts = {"software": environment.software(), "machine": harness.machine()}
    facts |= {"tokens": TOKENS, "page_size": PAGE_SIZE, "read_order": cpu.read_order()}
    for isa in compile.available_isas()[:2]:
        os.environ["TREEATTN_ISA"] = isa
        builds[isa] = measure(options.rounds)
        harness.show(builds[isa], f"{isa}: ")
    options.write(facts | {"builds": builds})


if __name__ == "__main__":
    main()
