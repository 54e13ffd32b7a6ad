"""The harness on real ranks, a few iterations each: what it counts and checks; never how long it takes."""

from __future__ import annotations

import time

import numpy as np
import pytest

from treeattn import routes
from treeattn.errors import RestrictionError
from treeattn.study.clock import Clock
from treeattn.study.loop import Loop
from treeattn.study.measure import Bench, Effort
from treeattn.study.results import FLOOR, NULL, Key
from treeattn.study.sweep import COMPUTE_WHILE_COMMUNICATING, Sweep, keys

pytestmark = pytest.mark.mpi

EFFORT = Effort(repetitions=2, iterations=3, seconds=1e-3)
SECOND = 10**9


def key_of(comm, scheme, what="reduce", **changes):
    shape = {"batch": 2, "queries": 3, "heads": 8, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
    return Key(**{"what": what, "scheme": scheme, "ranks": comm.size, "tokens": 37, **shape, **changes})


def block_of(comm, key):
    bench = Bench(comm, EFFORT, crowded=True, seed=1)
    return bench.block(key, bench.problem(key), memory=True)


def test_clocks_that_differ_are_brought_together(comm):
    """Every rank's clock is wrong by a known amount, which the estimate must find within its stated error."""
    wrong = (comm.rank % 3) * SECOND
    clock = Clock(comm, lambda: time.perf_counter_ns() + wrong, identity=str(comm.rank % 3))
    assert clock.count == min(comm.size, 3)
    found = clock.compare()
    assert abs(found.offset + wrong) <= found.error
    assert (found.error > 0) == (wrong > 0)


def test_ranks_of_one_machine_read_one_clock(comm):
    clock = Clock(comm)
    assert clock.count == 1
    assert clock.compare()[:2] == (0, 0)


def test_loop_notes_every_instant_on_one_clock(comm):
    wrong = comm.rank * SECOND
    clock = Clock(comm, lambda: time.perf_counter_ns() + wrong, identity=str(comm.rank))
    calls = []
    parts = [lambda: calls.append("first"), lambda: calls.append("second")]
    times = Loop(comm, clock, crowded=True, seed=0).run(parts, lambda: calls.append("prepare"), 4, skew=50.0)
    assert calls == ["prepare", "first", "second"] * 4
    if comm.rank:
        assert times is None
        return
    assert times.instants.shape == (comm.size, 4, 3)
    assert 0 <= times.late <= 4
    samples = times.samples(("first", "second"))
    assert all(len(values) == 4 for values in samples.values())
    completion, slowest = (np.array(samples[name]) for name in ("completion", "slowest"))
    assert (completion >= slowest - 1e-3 * times.clock_error).all()
    assert (np.array(samples["after_last_entry"]) <= completion).all()
    assert completion.max() < 1e8  # the seconds that the clocks differ by are gone


@pytest.mark.parametrize("what", ["reduce", "decode"])
@pytest.mark.parametrize(
    "scheme", [NULL, FLOOR, *(n for n, row in routes.CATALOG.items() if "cpu" in row.devices)]
)
def test_every_scheme(comm, scheme, what):
    if what == "reduce" and scheme in COMPUTE_WHILE_COMMUNICATING:
        return  # it has no such part; the sweep leaves it out
    key = key_of(comm, scheme, what)
    point = block_of(comm, key)
    if comm.rank:
        assert point is None
        return
    names = {"completion", "after_last_entry", "slowest"}
    names |= {"local", "reduce", "finish"} if what == "decode" else set()
    names |= {"null_merge"} if what == "reduce" and point["scheduled"] else set()
    assert set(point["samples"]) == names
    assert all(len(series) == 3 for series in point["samples"].values())
    assert point["sent"] == point["scheduled"] or point["scheduled"] is None
    assert point["held"] > 0
    if scheme in (NULL, FLOOR):
        assert point["error_out"] is None
        return
    assert point["error_out"] <= point["bound_out"]
    assert point["error_lse"] <= point["bound_lse"]
    assert point["same_bits"] is (None if routes.scattered(scheme) and comm.size > 1 else True)


def test_records_of_bfloat16(comm):
    key = key_of(comm, "recursive_doubling", "decode", wire="bfloat16")
    point = block_of(comm, key)
    whole = block_of(comm, key_of(comm, "recursive_doubling", "decode"))
    if comm.rank == 0:
        assert point["same_bits"] is True
        assert point["error_out"] < 0.1
        assert point["sent"] == point["scheduled"]
        assert 2 * point["sent"]["intra"][1] == whole["sent"]["intra"][1]
        assert point["error_out"] > 100 * whole["error_out"]


@pytest.mark.parametrize("scheme", ["head_scatter", "mpi_allreduce"])
def test_bfloat16_is_refused_where_there_is_no_way(comm, scheme):
    with pytest.raises(RestrictionError, match="cannot send bfloat16"):
        block_of(comm, key_of(comm, scheme, wire="bfloat16"))


def test_more_tokens_than_a_period_and_fewer_than_ranks(comm):
    for tokens in (1, 2048 * comm.size + 5):
        point = block_of(comm, key_of(comm, "binary_tree", "decode", tokens=tokens, batch=1, queries=1))
        if comm.rank == 0:
            assert point["error_out"] <= point["bound_out"]


def test_sweep_over_ranks_goes_on_after_a_scheme_that_fails(comm):
    ranks = sorted({1, comm.size})
    plan = keys(
        ["ring", "hierarchical:nodes=99"], ranks=ranks, what=["reduce"], batch=[1], queries=[1], heads=[4],
        kv_heads=[0], head_dim=[16], dtype=["float32"], wire=["float32"], skew=[0.0], tokens=[1],
    )  # fmt: skip
    points, failures = [], []
    Sweep(
        plan, EFFORT, 1, 0, {},
        point=lambda block, fields: points.append((block.key.ranks, block.repetition)),
        failed=lambda key, error: failures.append(key.ranks),
        began=lambda block: None,
    ).run(comm)  # fmt: skip
    if comm.rank == 0:
        assert points == [(size, repetition) for size in ranks for repetition in range(2)]
        assert failures == ranks
    else:
        assert points == failures == []
