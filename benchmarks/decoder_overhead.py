"""What a planned Decoder adds to kernel and reduction at one rank: python benchmarks/decoder_overhead.py

Goal: 0.5 microseconds with the same arrays every step, 3 with new array objects, as slicing a growing cache
gives. A step of the decoder is timed against bare C calls (attention and finish through ctypes, everything
bound) and against its three parts (local, reduce, finish), interleaved; new arrays have to be made, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

import treeattn
from treeattn import communicators
from treeattn.backends import cpu
from treeattn.study import environment


def microseconds(run, iterations: int = 2000) -> float:
    began = time.perf_counter()
    for _ in range(iterations):
        run()
    return (time.perf_counter() - began) / iterations * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    draw = np.random.default_rng(0)
    q, k, v = (draw.random((1, n, 16, 128), np.float32) for n in (1, 8, 8))
    lengths = np.array([1])
    with treeattn.Decoder(
        communicators.world(), heads=16, kv_heads=16, head_dim=128, dtype="float32",
        scheme="recursive_doubling",
    ) as decoder:  # fmt: skip
        attention = cpu.PlannedAttention(decoder.records, scale=decoder.scale)
        attention(q, k, v, lengths)
        bare = attention._kernels.partial_attention
        finish = cpu.planned_finish(decoder.records, decoder.out, decoder.lse)

        def new():
            return q, k[:, :4], v[:, :4], np.array([1])

        def parts(*arrays):
            decoder.local(*arrays)
            decoder.reduce()
            return decoder.finish()

        steps = {
            "bare kernels": lambda: (bare(attention._pointer), finish()),
            "same arrays": lambda: decoder(q, k, v, lengths),
            "same arrays, in three parts": lambda: parts(q, k, v, lengths),
            "new arrays and lengths": lambda: decoder(*new()),
            "new arrays and lengths, in three parts": lambda: parts(*new()),
            "making new arrays alone": new,
        }
        rows: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(50):
            for name, run in steps.items():
                rows[name].append(microseconds(run))
    medians = {name: statistics.median(values) for name, values in rows.items()}
    for name, value in medians.items():
        print(f"{name:38s} {value:7.2f} us, {value - medians['bare kernels']:6.2f} more than bare kernels")
    if options.json:
        facts = {"software": environment.software(), "cpu": environment.cpu_name(), "median_us": medians}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
