"""What the paper's equations say of memory and traffic, held against real ranks."""

import tracemalloc

import pytest

from treeattn.study import laws
from treeattn.study.compare import measure, problems, steps
from treeattn.study.compare.rows import Key

pytestmark = pytest.mark.mpi


@pytest.fixture
def planned(comm):
    """Makes a step of 24 tokens a rank or so, and its arguments."""

    def make(scheme, tokens):
        key = Key("decode", scheme, comm.size, tokens, 1, 1, 8, 8, 16, "bfloat16")
        inputs = problems.decode_inputs(comm, key)
        return steps.plan(comm, key, {}), (inputs.q, inputs.k, inputs.v)

    return make


@pytest.mark.parametrize(
    "scheme",
    ["kv_ring", "kv_ring:rotation=full", "query_ring", "three_allreduce", "reduce_scatter_gather",
     "binary_tree", "ring"],
)  # fmt: skip
def test_volume_is_that_of_equations_10_and_14(scheme, comm, planned):
    step, given = planned(scheme, 24)
    with step:
        step(*given)
        sent = measure.handed_over(comm, step.sent, comm.nodes)
    if comm.size == 1:
        return
    hops = comm.size if scheme.endswith("full") else comm.size - 1
    expected = 4 * float(laws.tree_volume(1, 8, 16, comm.size)) * comm.size
    if scheme.startswith("kv_ring"):
        expected = 2 * laws.ring_volume(1, 24, 8, 16, hops)
    # What a library does with the three sums it alone knows: they are counted as they are handed over.
    expected *= comm.size / 2 / (comm.size - 1) if scheme == "three_allreduce" else 1
    assert sum(value for name, value in sent.items() if name.startswith("bytes") and value) == pytest.approx(
        expected
    )


@pytest.mark.parametrize(("scheme", "shards"), [("binary_tree", 1), ("kv_ring", 2)])
def test_memory_is_that_of_equations_8_and_9(scheme, shards, comm, planned):
    """Of a ring one more shard on 2 ranks, two from 3 on, whose arrivals change places."""
    tokens = 4096
    step, given = planned(scheme, comm.size * tokens)
    with step:
        step(*given)  # loads what the first one does
    tracemalloc.start()
    try:
        step, given = planned(scheme, comm.size * tokens)
        for _ in range(2):
            tracemalloc.reset_peak()
            step(*given)
        peak = tracemalloc.get_traced_memory()[1]
        step.close()
    finally:
        tracemalloc.stop()
    of_rank = 2 * laws.shard_elements(1, tokens, 8, 16)
    extra = shards - 1 if comm.size == 2 else 2 * (shards - 1)
    if comm.size > 1:
        assert max(comm.allgather(peak)) == pytest.approx((1 + extra) * of_rank, rel=0.1)
