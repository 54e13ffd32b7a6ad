"""The paper's experiments on real ranks, settings smaller still: what they count, not how long it takes."""

import pytest

from treeattn.errors import TreeattnError
from treeattn.study.paper import EXPERIMENTS, experiment
from treeattn.study.paper.volume import SCHEMES

EFFORT = {"repetitions": 1, "iterations": 3, "seconds": 1e-3}


def rows_of(comm, tables, index=0):
    """Rows on rank 0; None elsewhere and where the job has too few ranks."""
    if comm.rank or comm.size == 1:
        assert tables == []
        return None
    return tables[index].rows


def test_a_ring_holds_another_shard_than_a_tree(comm):
    """One more on 2 ranks, two from 3 on, whose arrivals change places; and each holds what the law says."""
    small = {"shard": 4096, "ranks": (2, 4), "heads": (4,), "head_dim": 16}
    tables = EXPERIMENTS["memory"].measure(comm, **small)
    rows = rows_of(comm, tables)
    if rows is None:
        return
    shard = 2 * 4096 * 4 * 16 * 2 / 1e6
    held = {(row["ranks"], row["scheme"]): row["together, MB: here"] for row in rows}
    for row in rows:
        if row["ranks"] == 2:
            assert row["together, MB: here"] == pytest.approx(row["eq. 8, 9, MB: model"], abs=0.1)
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
