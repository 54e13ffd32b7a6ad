"""The harness on real ranks, a few iterations each: what it counts and checks; never how long it takes."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from tests.support.drawn import sample
from treeattn.collectives.runtime import mpi_communicator
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.errors import RestrictionError
from treeattn.selection import CATALOG, select
from treeattn.study.compare import steps
from treeattn.study.compare.loop import Clock, Loop
from treeattn.study.compare.measure import Bench, Budget, sweep
from treeattn.study.compare.rows import SUM, Key

ON_CPU = [name for name, row in CATALOG.items() if "cpu" in row.devices and name != "kv_ring"]
BUDGET = Budget(repetitions=2, iterations=3, seconds=1e-3)
SECOND = 10**9


def key_of(comm, scheme, what="reduce", **changes):
    shape = {"batch": 2, "queries": 3, "heads": 8, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
    return Key(**{"what": what, "scheme": scheme, "ranks": comm.size, "tokens": 37, **shape, **changes})


def test_clocks_that_differ_are_brought_together(comm):
    """Every rank's clock is wrong by a known amount, which the estimate must find within its stated error."""
    wrong = (comm.rank % 3) * SECOND
    clock = Clock(comm, lambda: time.perf_counter_ns() + wrong, identity=str(comm.rank % 3))
    assert clock.count == min(comm.size, 3)
    found = clock.compare()
    assert abs(found.offset + wrong) <= found.error
    assert (found.error > 0) == (wrong > 0)


def test_nobody_enters_before_all_are_ready(comm):
    clock, ready = Clock(comm), []

    def prepare():
        time.sleep(0.002 * (comm.rank == 0))
        ready.append(clock.now())

    times = Loop(comm, clock, oversubscribed=True).run([lambda: None], prepare, 3)
    everyone = comm.gather(ready)
    if times is not None:
        assert (times.instants[:, :, 0].min(0) >= np.array(everyone).max(0)).all()


def test_loop_notes_every_instant_on_one_clock(comm):
    wrong = comm.rank * SECOND
    clock = Clock(comm, lambda: time.perf_counter_ns() + wrong, identity=str(comm.rank))
    calls = []
    parts = [lambda: calls.append("first"), lambda: calls.append("second")]
    times = Loop(comm, clock, oversubscribed=True).run(parts, lambda: calls.append("prepare"), 4)
    assert calls == ["prepare", "first", "second"] * 4
    if comm.rank:
        assert times is None
        return
    assert times.instants.shape == (comm.size, 4, 3)
    assert 0 <= times.late <= 4
    samples = times.samples(("first", "second"))
    assert all(len(values) == 4 for values in samples.values())
    completion = np.array(samples["completion"])
    assert (np.array(samples["after_last_entry"]) <= completion).all()
    assert completion.max() < 1e8  # the seconds that the clocks differ by are gone


@pytest.mark.parametrize("what", ["reduce", "decode"])
@pytest.mark.parametrize("scheme", [SUM, "kv_ring", *sample(5, ON_CPU)])
def test_every_scheme(comm, scheme, what):
    if what == "reduce" and scheme in ("kv_ring", "query_ring"):
        return  # it has no such part; the sweep leaves it out
    key, bench = key_of(comm, scheme, what), Bench(comm, BUDGET, {})
    point = bench.block(key, bench.inputs(key))
    if comm.rank:
        assert point is None
        return
    assert 0 < point["time_us"] <= point["completion_us"]
    assert point["least_us"] <= point["mean_us"] <= point["slowest_us"]
    assert point["iterations"] == 3
    assert {"local_us", "reduce_us", "finish_us"} <= point.keys() or what == "reduce"
    assert point["as_scheduled"] is not False
    assert (point["algbw"] is None) == (what == "decode")
    if scheme == SUM:
        assert "error_out" not in point
        return
    assert point["error_out"] <= point["bound_out"]
    assert point["error_lse"] <= point["bound_lse"]
    assert point["same_bits"] is (None if select(scheme).row.scattered and comm.size > 1 else True)


def test_bits_that_differ_between_ranks_are_told(comm):
    bench, key = Bench(comm, BUDGET, {}), key_of(comm, "chain")
    inputs = bench.inputs(key)
    expected = comm.bcast(inputs.expected)
    out = expected[0] + 1e-3 * (comm.rank + 1)
    facts = bench._judged(inputs, SimpleNamespace(heads=slice(0, key.heads), out=out, lse=expected[1]))
    if comm.rank == 0:
        assert facts["same_bits"] is (comm.size == 1)
        assert facts["error_out"] == pytest.approx(1e-3)
        assert facts["error_lse"] == 0


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float64", 8), ("bfloat16", 4)])
def test_the_sum_adds_as_many_bytes_as_records_have(monkeypatch, comm, dtype, size):
    handed = []
    spy = SimpleNamespace(Allreduce=lambda *arguments: handed.append(arguments))
    monkeypatch.setattr(mpi_communicator, "duplicate", lambda _: SimpleNamespace(unwatched=spy, free=tuple))
    key = key_of(comm, SUM, dtype=dtype)
    records = np.zeros((2, 8, 3, 18), np.float64 if dtype == "float64" else np.float32)
    steps.library_sum(key, ReductionSpec(comm, None, records))()
    ((mine, total, operation),) = handed
    assert mine.nbytes == total.nbytes == records.size * size == key.record_bytes
    assert operation == MPI.SUM
    assert np.shares_memory(mine, records)


def test_a_sweep_goes_on_after_a_scheme_that_fails(comm):
    plan = [key_of(comm, scheme) for scheme in ("ring", "hierarchical:nodes=99")]
    began, points, failures = [], [], []
    for block, found in sweep(comm, plan, BUDGET, say=began.append):
        if isinstance(found, RestrictionError):
            failures.append(block.key.scheme)
        else:
            points.append((block.key.scheme, block.repetition))
    blocks = [("ring", 0), ("ring", 1)]
    assert points == (blocks if comm.rank == 0 else [])
    assert failures == ["hierarchical:nodes=99"]
    assert began[0].endswith(": 0 of 4 blocks are done")  # in whatever order, and no time is known
