"""The paper's experiments on real ranks, settings smaller still: what they count, not how long it takes."""

from __future__ import annotations

import pytest

from treeattn.errors import TreeattnError
from treeattn.study.compare.measure import Effort
from treeattn.study.paper import EXPERIMENTS, experiment
from treeattn.study.paper.bandwidth import ping_pong
from treeattn.study.paper.steps import certified
from treeattn.study.paper.volume import SCHEMES

pytestmark = pytest.mark.mpi

EFFORT = Effort(repetitions=1, iterations=3, seconds=1e-3)


def rows_of(comm, tables, index=0):
    """Rows as dictionaries on rank 0; None elsewhere and where the job has too few ranks."""
    if comm.rank or comm.size == 1:
        assert tables == []
        return None
    table = tables[index]
    return [dict(zip(table.headings, row, strict=True)) for row in table.rows]


def test_latency(comm):
    small = {"tokens": (10, 40), "ranks": (2, 3), "heads": 4, "head_dim": 16, "effort": EFFORT}
    rows = rows_of(comm, EXPERIMENTS["latency"].measure(comm, **small))
    if rows is None:
        return
    sizes = [ranks for ranks in (2, 3) if ranks <= comm.size]
    assert [(row["ranks"], row["tokens"]) for row in rows] == [(r, t) for r in sizes for t in (10, 40)]
    for row in rows:
        assert row["ring / tree: here"] == row["kv_ring, ms: here"] / row["three_allreduce, ms: here"] > 0


def test_memory_is_what_our_buffers_add_up_to(comm):
    """But for Python's objects and a workspace, which do not grow with the tokens."""
    small = {"shard": 2048, "ranks": (2, 4), "heads": (4,), "head_dim": 16}
    tables = EXPERIMENTS["memory"].measure(comm, **small)
    rows = rows_of(comm, tables)
    if rows is None:
        return
    shard = 2 * 2048 * 4 * 16 * 2 / 1e6
    held = {(row["ranks"], row["scheme"]): row["together, MB: here"] for row in rows}
    for row in rows:
        assert 0 <= row["rest, kB"] < 100
    assert held[2, "kv_ring"] - held[2, "binary_tree"] == pytest.approx(shard, rel=0.1)
    if comm.size >= 4:
        assert held[4, "kv_ring"] - held[4, "binary_tree"] == pytest.approx(2 * shard, rel=0.1)


def test_volume_is_the_law_s(comm):
    small = {"tokens": 24, "ranks": (2, 4), "heads": 8, "head_dim": 16, "effort": EFFORT}
    rows = rows_of(comm, EXPERIMENTS["volume"].measure(comm, **small))
    if rows is None:
        return
    for row in rows:
        assert row["equation"] == SCHEMES[row["scheme"]]
        expected = {"three_allreduce": 2 / 3, "recursive_doubling": 4 / 3}.get(row["scheme"], 1)
        assert row["here / model"] == pytest.approx(expected if row["ranks"] == 4 else 1)


def test_steps_are_those_that_were_proved(comm):
    schemes = ("k_nomial_tree", "recursive_doubling", "chain")
    small = {"ranks": (2, 3), "schemes": schemes, "heads": 4, "head_dim": 16, "effort": EFFORT}
    rows = rows_of(comm, EXPERIMENTS["steps"].measure(comm, **small))
    if rows is None:
        return
    for row in rows:
        proved = certified(row["scheme"], row["ranks"])
        assert (row["depth: here"], row["rounds: here"]) == (proved.depth, proved.rounds)


def test_bandwidth(comm):
    tables = EXPERIMENTS["bandwidth"].measure(comm, sizes=(1, 1000), volume=1000, fewest=2, most=4)
    rows = rows_of(comm, tables)
    if rows is None:
        return
    assert [row["bytes"] for row in rows] == [1, 1000]
    assert "this job has no two ranks between nodes" in tables[0].title
    for row in rows:
        half, rate = row["within a node (ranks 0, 1), µs: here"], row["within a node, GB/s: here"]
        assert half > 0
        assert rate == pytest.approx(row["bytes"] / half / 1e3)


def test_any_pair_may_play(comm):
    if comm.size > 2:
        assert ping_pong(comm, (comm.size - 1, 1), 64, 3) > 0


def test_a_scheme_that_cannot_run_is_an_error_on_every_rank(comm):
    key = experiment.decode_key("hierarchical:nodes=5+5", comm.size, 10, 4, 16)
    with pytest.raises(TreeattnError, match="10 ranks"):
        experiment.run(comm, [key], EFFORT)


def test_a_wrong_result_is_not_shown(comm, monkeypatch):
    from treeattn.study.compare import problems

    exact = problems._judged
    monkeypatch.setattr(problems, "_judged", lambda *given: (exact(*given)[0], (0.0, 0.0)))
    key = experiment.decode_key("chain", comm.size, 100, 4, 16)
    with pytest.raises(TreeattnError, match="chain on .* ranks: error"):
        experiment.run(comm, [key], EFFORT)


def test_llama(comm):
    tables = EXPERIMENTS["llama"].measure(comm, tokens=(30, 50), repeats=2, ranks=3)
    rows = rows_of(comm, tables)
    if rows is None:
        return
    assert [row["tokens"] for row in rows] == [30, 50]
    for row in rows:
        by_tree, by_ring = row["nine tokens by tree, s: here"], row["nine tokens by ring, s: here"]
        assert row["ring / tree: here"] == pytest.approx(by_ring / by_tree)
        assert row["+- (standard error)"] > 0
    assert f"{min(comm.size, 3)} ranks" in tables[0].title
    assert "means of 2 repeats, +- their standard error" in tables[0].title
