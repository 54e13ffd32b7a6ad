"""What steps send and hold: as the paper's equations say, and as baselines count it."""

import tracemalloc

import numpy as np
import pytest

import treeattn
from tests.support.problems import assert_exact, random_qkv
from tests.support.ranks import own_run
from tests.support.schemes import Way
from treeattn.baselines import BASELINES
from treeattn.study import laws
from treeattn.study.compare import problems, steps
from treeattn.study.compare.rows import Key


@pytest.mark.parametrize(("scheme", "shards"), [("binary_tree", 1), ("kv_ring", 2)])
def test_memory_is_that_of_equations_8_and_9(scheme, shards, comm):
    """Of a ring one more shard on 2 ranks, two from 3 on, whose arrivals change places."""
    tokens = 4096
    key = Key("decode", scheme, comm.size, comm.size * tokens, 1, 1, 8, 8, 16, "bfloat16")

    def planned():
        inputs = problems.decode_inputs(comm, key)
        return steps.plan(comm, key, {}), (inputs.q, inputs.k, inputs.v)

    step, given = planned()
    with step:
        step(*given)  # loads what the first one does
    tracemalloc.start()
    try:
        step, given = planned()
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


@pytest.mark.parametrize("rotation", ["partial", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_ring_sends_what_equation_10_says(comm, rotation, dtype):
    """2 b t d elements per hop, with the hops and the KV heads of the variant."""
    batch, tokens, heads, kv_heads, head_dim = 3, 5, 6, 2, 64
    hops = comm.size if rotation == "full" and comm.size > 1 else comm.size - 1
    d = head_dim * kv_heads
    scheme = f"kv_ring:rotation={rotation}"
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "batch": batch, "dtype": dtype}
    element = np.dtype(treeattn.attention.shape.DTYPES[dtype])
    q = np.ones((batch, 1, heads, head_dim), element)
    k = np.ones((batch, tokens, kv_heads, head_dim), element)
    with treeattn.Decoder(comm, **shape, scheme=scheme) as decoder:
        decoder(q, k, k)
        assert totals(decoder.sent) == (2 * hops, 2 * batch * tokens * d * hops * element.itemsize)
        assert {destination for destination, _ in decoder.sent} <= {(comm.rank + 1) % comm.size}
        decoder(q, k[:, :0], k[:, :0])
        assert totals(decoder.sent) == (0, 0)


def test_keys_and_values_beyond_the_largest_message_go_in_parts(comm, monkeypatch):
    monkeypatch.setattr("treeattn.baselines.kv_ring.LARGEST_MESSAGE", 1000)
    q, k, v = random_qkv(tokens=9 * comm.size, heads=4, kv_heads=2)
    own = own_run(comm, 9 * comm.size)
    with treeattn.Decoder(
        comm, heads=4, kv_heads=2, head_dim=64, dtype="float32", scheme="kv_ring:rotation=full"
    ) as decoder:
        out, lse = decoder(q, k[:, own], v[:, own])
        assert_exact((out, lse), q, np.repeat(k, 2, axis=2), np.repeat(v, 2, axis=2), scale=1 / 8)
        size, hops = 9 * 2 * 64 * 4, comm.size if comm.size > 1 else 0
        assert totals(decoder.sent) == (2 * hops * -(-size // 1000), 2 * hops * size)
        assert max((length for _, length in decoder.sent), default=1000) == 1000


def totals(sent):
    """(messages, bytes)"""
    return len(sent), sum(size for _, size in sent)


def test_other_baselines_say_what_they_send(comm):
    p, heads = comm.size, 2 * comm.size
    q, k, v = random_qkv(tokens=10, heads=heads, kv_heads=heads, batch=3)
    sent = {}
    for scheme in BASELINES:
        with Way(comm, scheme).planned(heads=heads, kv_heads=heads, batch=3) as decoder:
            decoder(q, k, v)
            sent[scheme] = decoder.sent
    records = 3 * heads * (64 + 2) * 4
    assert totals(sent["query_ring"]) == (2 * (p - 1), 2 * (p - 1) * records // p)  # equation 14
    assert sent["three_allreduce"] == sent["two_allreduce"] == records  # bytes: a library sends as it likes
    assert sent["head_all_to_all"] == records * (p - 1) // p


def test_slices_without_heads_are_not_sent(comm):
    """More ranks than KV heads: as many slices travel as there are heads."""
    q, k, v = random_qkv(tokens=10, heads=2, kv_heads=1)
    with Way(comm, "query_ring").planned(heads=2, kv_heads=1) as decoder:
        decoder(q, k, v)
        messages, size = totals(decoder.sent)
        assert size == messages * 2 * (64 + 2) * 4
        assert comm.allreduce(messages) == 2 * (comm.size - 1)


@pytest.mark.parametrize("scheme", ["kv_ring", "query_ring"])
def test_a_ring_needs_the_arrays_of_each_step(comm, scheme):
    """`local` takes them and sends nothing: the last ones count, and for one step."""
    q, k, v = random_qkv(tokens=10)
    with Way(comm, scheme).planned(kv_heads=2) as decoder:
        for _ in range(2):
            with pytest.raises(treeattn.StateError, match="local.. comes before reduce"):
                decoder.reduce()
            if comm.rank == 0:
                decoder.local(-q, k, v)
            decoder.local(q, k, v)
            decoder.reduce()
        with pytest.raises(treeattn.ArgumentError, match="lengths"):
            decoder.local(q, k, v, lengths=np.array([11]))
        decoder.local(q, k, v)
        decoder._reducer.start()
        with pytest.raises(treeattn.StateError, match="already running"):
            decoder.local(q, k, v)
        decoder._reducer.wait()
