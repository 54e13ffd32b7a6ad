"""What new views of a growing cache cost the host before a GPU kernel starts:

    python benchmarks/gpu_binding.py [--json FILE]

Goal: under 15 microseconds a step. NumPy arrays stand for those of a device and nothing is launched, so that
this needs no GPU: what CuPy adds, in its launch above all, is not in it (benchmarks/gpu_kernel.py has it).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from treeattn.backends import cuda
from treeattn.files import output_writer
from treeattn.study import environment

TOKENS = 65536
STEPS = 1000


class NoDevice:
    """A runtime with NumPy's arrays, which launches nothing."""

    multiprocessors = 132
    shared_bytes = 227 << 10
    tensor_cores = True

    def kernel(self, *_):
        return lambda *_, **__: None

    def resident_blocks(self, *_):
        return 2

    def zeros(self, size, dtype):
        return np.zeros(size, dtype)

    def address(self, array):
        return array.__array_interface__["data"][0]

    def check(self, name, array):
        assert isinstance(array, np.ndarray), name


def microseconds(step, first: int) -> float:
    began = time.perf_counter()
    for tokens in range(first, first + STEPS):
        step(tokens)
    return (time.perf_counter() - began) / STEPS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    write = output_writer(options.json)
    cache = np.zeros((2, 1, TOKENS, 8, 128), np.float16)
    q, lengths = np.zeros((1, 1, 32, 128), np.float16), np.array([TOKENS])
    planned = cuda.PlannedAttention(np.zeros((1, 32, 1, 130), np.float32), scale=0.1, runtime=NoDevice())
    whole = tuple(cache)
    steps = {
        "same arrays": lambda _: planned(q, *whole, lengths),
        "new views of a growing cache": lambda n: planned(q[:], cache[0, :, :n], cache[1, :, :n], lengths),
        "the views alone": lambda n: (q[:], cache[0, :, :n], cache[1, :, :n]),
    }
    rows = {name: [] for name in steps}
    for turn in range(50):
        for name, step in steps.items():
            rows[name].append(microseconds(step, 2 + turn * STEPS))
    medians = {name: statistics.median(values) for name, values in rows.items()}
    for name, value in medians.items():
        print(f"{name:30s} {value:7.2f} us")
    facts = {"software": environment.software(), "cpu": environment.cpu_name(), "median_us": medians}
    write((json.dumps(facts, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
