"""The ranks of a node as streams of one GPU: launches that really run at the same time.

Processes that share a GPU take turns, so acquire and release, slots that are used again and the second set of
them meet nobody. Here all ranks are in flight for hundreds of steps. CUDA_DEVICE_MAX_CONNECTIONS=32 gives
each stream a queue of its own; with fewer than that they may serialize, and a step would never end.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.gpu.rank_streams import Streams
from treeattn import collectives
from treeattn.backends import cpu
from treeattn.collectives.executors import loopback

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
pytestmark = pytest.mark.skipif(
    int(os.environ.get(_QUEUES, 8)) < 8, reason=f"{_QUEUES} is below the 8 streams of this test"
)
HEAD_DIM, STEPS, KINDS = 128, 400, 8


@pytest.mark.parametrize("records", [16, 128])
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("scheme", collectives.names("schedule"))
def test_ranks_at_the_same_time_have_the_bits_of_the_definition(scheme: str, size: int, records: int) -> None:
    import cupy

    rng = np.random.default_rng(size * records)
    made = rng.standard_normal((KINDS, size, records, HEAD_DIM + 2)).astype(np.float32) * 5
    made[..., 1] = np.abs(made[..., 1])
    there = cupy.asarray(made)
    held = cupy.empty((STEPS, size, records, HEAD_DIM + 2), np.float32)
    with Streams(collectives.build(scheme, size), records, HEAD_DIM) as ranks:
        cupy.cuda.Device().synchronize()
        for step in range(STEPS):
            for rank in map(int, rng.permutation(size)):  # another order of arrival each time
                with ranks.streams[rank]:
                    cupy.copyto(ranks.buffers[rank], there[step % KINDS, rank])
                    ranks.steps[rank]()
                    cupy.copyto(held[step, rank], ranks.buffers[rank])
        cupy.cuda.Device().synchronize()
        assert [step.timed_out_peer() for step in ranks.steps] == [None] * size
        got, schedule = held.get(), ranks.schedule
    for kind in range(KINDS):
        wanted = loopback.run(schedule, list(made[kind]), cpu.MergeOperator(HEAD_DIM))
        for rank, want in enumerate(wanted):
            part = schedule.chunk_slice(schedule.promised(rank), records)
            for step in range(kind, STEPS, KINDS):
                np.testing.assert_array_equal(got[step, rank][part].view(np.uint32), want.view(np.uint32))
