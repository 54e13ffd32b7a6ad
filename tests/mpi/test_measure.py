"""The harness on real ranks, a few iterations each: what it counts and checks; never how long it takes."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from treeattn.collectives.clusters.disturbance import TOGETHER, arrivals
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.errors import ArgumentError, RestrictionError
from treeattn.selection import CATALOG, select
from treeattn.study.compare import problems, steps
from treeattn.study.compare.clock import Clock, Offset
from treeattn.study.compare.loop import Loop
from treeattn.study.compare.measure import Bench, Effort
from treeattn.study.compare.schema import NULL, SUM, Key
from treeattn.study.compare.sweep import Sweep, keys

pytestmark = pytest.mark.mpi

EFFORT = Effort(repetitions=2, iterations=3, seconds=1e-3)
SECOND = 10**9


def key_of(comm, scheme, what="reduce", **changes):
    shape = {"batch": 2, "queries": 3, "heads": 8, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
    return Key(**{"what": what, "scheme": scheme, "ranks": comm.size, "tokens": 37, **shape, **changes})


def block_of(comm, key):
    bench = Bench(comm, EFFORT, oversubscribed=True, seed=1)
    return bench.block(key, bench.problem(key), memory=True)


def test_clocks_that_differ_are_brought_together(comm):
    """Every rank's clock is wrong by a known amount, which the estimate must find within its stated error."""
    wrong = (comm.rank % 3) * SECOND
    clock = Clock(comm, lambda: time.perf_counter_ns() + wrong, identity=str(comm.rank % 3))
    assert clock.count == min(comm.size, 3)
    found = clock.compare()
    assert abs(found.offset + wrong) <= found.error
    assert (found.error > 0) == (wrong > 0)


def test_the_fastest_round_trip_is_kept(comm):
    """Rank 0's clock is scripted, all others stand still at 5; the second of 30 trips is the best: 30 ns."""
    trips = [70, 30, *[90] * 28]

    def scripted():
        for trip in itertools.count():
            yield 1000 * trip
            yield 1000 * trip + trips[trip % 30]

    now = scripted().__next__ if comm.rank == 0 else lambda: 5
    found = Clock(comm, now, identity=str(comm.rank)).compare()
    if comm.rank:
        before = 30_000 * (comm.rank - 1)
        assert found[:2] == (before + 1000 + 15 - 5, 15)


def test_nobody_enters_before_all_are_ready(comm):
    clock, ready = Clock(comm), []

    def prepare():
        time.sleep(0.002 * (comm.rank == 0))
        ready.append(clock.now())

    times = Loop(comm, clock, oversubscribed=True, seed=0).run([lambda: None], prepare, 3)
    everyone = comm.gather(ready)
    if times is not None:
        assert (times.instants[:, :, 0].min(0) >= np.array(everyone).max(0)).all()


def test_offsets_are_interpolated_and_the_larger_error_counts():
    """One rank, a clock that advances by 10 with each look and whose offset grows from 0 to 1000."""
    ticks = itertools.count(0, 10)
    offsets = iter([Offset(0, 5, 0), Offset(1000, 7, 1000)])
    clock = SimpleNamespace(now=ticks.__next__, compare=offsets.__next__)
    loop = Loop(MPI.COMM_SELF, clock, oversubscribed=False, seed=0)
    loop._lead = 0  # the scripted clock does not wait
    times = loop.run([lambda: None], lambda: None, 4)
    own = times.instants.reshape(-1)
    assert times.clock_error == 7e-3
    assert (own % 20 == 0).all()  # a reading t became t + 1000 t / 1000
    assert (np.diff(own) > 0).all()


@pytest.mark.parametrize(("agreement_ms", "most_ms"), [(0.01, 2), (7, 14)])
def test_the_lead_may_grow_to_twice_what_an_agreement_takes(agreement_ms, most_ms):
    """One rank whose clock says that each agreement takes so long."""
    ticks = itertools.count(0, int(1e6 * agreement_ms))
    clock = SimpleNamespace(now=ticks.__next__, compare=lambda: Offset(0, 0, 0))
    loop = Loop(MPI.COMM_SELF, clock, oversubscribed=False, seed=0)
    loop._adapt_lead(10**9)
    assert loop.lead == 1000 * most_ms


def test_ranks_of_one_machine_read_one_clock(comm):
    clock = Clock(comm)
    assert clock.count == 1
    assert clock.compare()[:2] == (0, 0)


def test_loop_notes_every_instant_on_one_clock(comm):
    wrong = comm.rank * SECOND
    clock = Clock(comm, lambda: time.perf_counter_ns() + wrong, identity=str(comm.rank))
    calls = []
    parts = [lambda: calls.append("first"), lambda: calls.append("second")]
    times = Loop(comm, clock, oversubscribed=True, seed=0).run(
        parts, lambda: calls.append("prepare"), 4, arrivals("random:50us")
    )
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
@pytest.mark.parametrize("scheme", [NULL, SUM, *(n for n, row in CATALOG.items() if "cpu" in row.devices)])
def test_every_scheme(comm, scheme, what):
    if what == "reduce" and scheme in ("kv_ring", "query_ring"):
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
    if scheme in (NULL, SUM):
        assert point["error_out"] is None
        return
    assert point["error_out"] <= point["bound_out"]
    assert point["error_lse"] <= point["bound_lse"]
    assert point["same_bits"] is (None if select(scheme).row.scattered and comm.size > 1 else True)


def test_cold_and_warm_are_different_runs(comm, monkeypatch):
    """The first call alone and together is cold; then come, with arrivals, those of the series."""
    late, runs = arrivals("random:20us"), []
    bench = Bench(comm, EFFORT, oversubscribed=True, seed=1, arrivals={late.text: late})
    run = bench.loop.run

    def noted(parts, prepare, iterations, enter=TOGETHER):
        runs.append((iterations, enter.text, run(parts, prepare, iterations, enter)))
        return runs[-1][2]

    monkeypatch.setattr(bench.loop, "run", noted)
    key = key_of(comm, "chain", arrivals=late.text)
    point = bench.block(key, bench.problem(key), memory=False)
    assert [(n, text) for n, text, _ in runs] == [(1, "together"), (3, late.text), (3, late.text)]
    if comm.rank == 0:
        (first, warm, null) = (times.samples()["completion"] for _, _, times in runs)
        assert point["first"] == first[0]
        assert point["samples"]["completion"] == warm
        assert point["samples"]["null_merge"] == null
        assert point["held"] is point["step_peak"] is None


class Hungry:
    """A step of known appetite: planning peaks at 6 MB and keeps 1, each step takes 2 more for a while."""

    def __init__(self, records):
        self.records, self.kept = records.copy(), bytearray(10**6)
        bytearray(5 * 10**6)

    def fold(self):
        bytearray(2 * 10**6)

    def close(self):
        pass


def test_memory_is_what_stays_and_what_a_further_step_adds(comm, monkeypatch):
    bench, key = Bench(comm, EFFORT, oversubscribed=True, seed=1), key_of(comm, "chain")
    problem = bench.problem(key)
    monkeypatch.setattr("treeattn.study.compare.steps.plan", lambda *_: Hungry(problem.records))
    found = bench._memory(key, problem)
    assert 0 <= found["held"] - 10**6 - problem.records.nbytes < 10**5
    assert 0 <= found["step_peak"] - 2 * 10**6 < 10**5


def test_bits_that_differ_between_ranks_are_told(comm):
    bench, key = Bench(comm, EFFORT, oversubscribed=True, seed=1), key_of(comm, "chain")
    problem = bench.problem(key)
    expected = comm.bcast(problem.expected)
    out = expected[0] + 1e-3 * (comm.rank + 1)
    facts = bench._judged(problem, SimpleNamespace(heads=slice(0, key.heads), out=out, lse=expected[1]))
    if comm.rank == 0:
        assert facts["same_bits"] is (comm.size == 1)
        assert facts["error_out"] == pytest.approx(1e-3)
        assert facts["error_lse"] == 0


@pytest.mark.parametrize(
    ("dtype", "wire", "size"),
    [
        ("float32", "float32", 4),
        ("float64", "float64", 8),
        ("bfloat16", "float32", 4),
        ("float32", "bfloat16", 2),
    ],
)
def test_the_sum_adds_as_many_bytes_as_records_have_under_way(monkeypatch, comm, dtype, wire, size):
    handed = []
    spy = SimpleNamespace(Allreduce=lambda *arguments: handed.append(arguments))
    monkeypatch.setattr(steps, "duplicate", lambda _: SimpleNamespace(unwatched=spy, free=tuple))
    key = key_of(comm, SUM, dtype=dtype, wire=wire)
    records = np.zeros((2, 8, 3, 18), np.float64 if dtype == "float64" else np.float32)
    steps.library_sum(key, ReductionSpec(comm, None, records))()
    ((mine, total, operation),) = handed
    assert mine.nbytes == total.nbytes == records.size * size
    assert operation == MPI.SUM
    assert np.shares_memory(mine, records)


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
    for tokens in (1, 2048 * comm.size + 5, 3 * 2048 * comm.size + 5):
        point = block_of(comm, key_of(comm, "binary_tree", "decode", tokens=tokens, batch=1, queries=1))
        if comm.rank == 0:
            assert point["error_out"] <= point["bound_out"]


def test_ranks_of_one_machine_share_its_memory(comm, monkeypatch):
    """Room for the inputs of one rank alone: enough where each has a machine, not where all share one."""
    key = key_of(comm, "binary_tree")
    monkeypatch.setattr(problems.environment, "free_memory", lambda: problems._input_bytes(comm, key))
    problems.check_room(comm, key, range(comm.size))
    if comm.size > 1:
        with pytest.raises(ArgumentError, match=f"inputs of {comm.size} ranks take .* their machine has"):
            problems.check_room(comm, key, [0] * comm.size)


def test_sweep_over_ranks_goes_on_after_a_scheme_that_fails(comm):
    ranks = sorted({1, comm.size})
    plan = keys(
        ["ring", "hierarchical:nodes=99"], ranks=ranks, what=["reduce"], batch=[1], queries=[1], heads=[4],
        kv_heads=[0], head_dim=[16], dtype=["float32"], wire=["float32"], arrivals=["together"], tokens=[1],
    )  # fmt: skip
    began, points, failures = [], [], []
    for block, found in Sweep(plan, EFFORT, 1, 0, {}).run(comm):
        if found is None:
            began.append((block.key.ranks, block.repetition))
        elif isinstance(found, RestrictionError):
            failures.append(block.key.ranks)
        else:
            points.append((block.key.ranks, block.repetition))
    mine = [size for size in ranks if comm.rank < size]
    blocks = [(size, repetition) for size in mine for repetition in range(2)]
    assert points == (blocks if comm.rank == 0 else [])
    assert failures == mine
    assert set(blocks) <= set(began)


def test_steps_that_cannot_be_planned_leave_no_communicator(comm, duplicates):
    for _ in range(3):
        with pytest.raises(RestrictionError, match="cannot send bfloat16"):
            steps.plan(comm, key_of(comm, "head_scatter", wire="bfloat16"), {})
    assert duplicates == [MPI.COMM_NULL] * len(duplicates)
    steps.plan(comm, key_of(comm, "chain", wire="bfloat16"), {}).close()
    assert duplicates
