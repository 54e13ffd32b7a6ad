"""What new views of a growing cache cost the host before a GPU kernel starts:

    python benchmarks/gpu_binding.py [--json FILE]

Goal: under 15 microseconds a step, of this process's own time on the processor. NumPy arrays stand for
those of a device and nothing is launched, so that this needs no GPU: what CuPy adds, in its launch above
all, is not in it (benchmarks/gpu_kernel.py has it).
"""

from __future__ import annotations

import itertools
import time

import harness
import numpy as np

from treeattn.backends import cuda

TOKENS = 65536


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


def main() -> None:
    options = harness.options(__doc__)
    cache = np.zeros((2, 1, TOKENS, 8, 128), np.float16)
    q, lengths = np.zeros((1, 1, 32, 128), np.float16), np.array([TOKENS])
    planned = cuda.PlannedAttention(np.zeros((1, 32, 1, 130), np.float32), scale=0.1, runtime=NoDevice())
    whole, grown = tuple(cache), itertools.cycle(range(2, TOKENS))

    def views() -> tuple:
        n = next(grown)
        return q[:], cache[0, :, :n], cache[1, :, :n]

    steps = {
        "same arrays": lambda: planned(q, *whole, lengths),
        "new views of a growing cache": lambda: planned(*views(), lengths),
        "the views alone": views,
    }
    medians = harness.medians(harness.timed(steps, 20, each=1000, scale=1e6, clock=time.process_time))
    for name, value in medians.items():
        print(f"{name:30s} {value:7.2f} us")
    options.write(harness.source() | {"median_us": medians})


if __name__ == "__main__":
    main()
