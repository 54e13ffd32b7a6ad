"""Many steps leave nothing behind: no memory, no descriptor. `make soak` takes a million of each executor."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from treeattn import Decoder, Reduction

pytestmark = pytest.mark.mpi

STEPS = int(os.environ.get("TREEATTN_SOAK_STEPS", "3000"))
GROWTH = 256 * 1024  # bytes that an allocator may still take for its own ends; a leak of a byte a step shows


def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("executor", ["mpi", "program", "slots"])
def test_nothing_grows(comm, executor):
    shape = {"heads": 4, "kv_heads": 4, "head_dim": 16, "dtype": "float32"}
    q, k = np.ones((1, 1, 4, 16), np.float32), np.ones((1, 8, 4, 16), np.float32)
    with Decoder(comm, **shape, scheme=Reduction(executor=executor)) as decoder:
        first = decoder(q, k, k)[0].copy()
        for _ in range(1000):
            decoder(q, k, k)
        before = resident(), len(os.listdir("/proc/self/fd")), sys.getallocatedblocks()
        for _ in range(STEPS):
            decoder(q, k, k)
        after = resident(), len(os.listdir("/proc/self/fd")), sys.getallocatedblocks()
        np.testing.assert_array_equal(decoder(q, k, k)[0], first)
    assert after[0] - before[0] <= GROWTH
    assert after[1] == before[1]
    assert after[2] - before[2] < 100
