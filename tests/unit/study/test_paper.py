"""The paper's experiments: every number of the models worked out once more, from other formulas."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from treeattn.study.paper import EXPERIMENTS, PUBLISHED, implied, latency, shown

GB = 1e9
DOCS = Path(__file__).resolve().parents[3] / "docs"
COMMITTED = json.loads((DOCS / "results/paper_simulated.json").read_text())["experiments"]
SLOW = pytest.mark.slow


def page(heading=None):
    """The words of docs/paper.md, or of one section of it."""
    text = (DOCS / "paper.md").read_text()
    if heading is not None:
        text = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return " ".join(text.split())


@functools.cache
def model(name):
    return EXPERIMENTS[name].model(**EXPERIMENTS[name].paper)


@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW if n == "latency" else ()) for n in EXPERIMENTS])
def test_the_page_explains_every_experiment_with_the_tables_of_today(name):
    """The committed tables, with which the page is filled, are those that the model gives now."""
    experiment = EXPERIMENTS[name]
    assert f"<!-- table paper_simulated.json:experiments/{name}/model/" in page()
    (kept,) = (entry for entry in COMMITTED if entry["name"] == name)
    assert (kept["title"], kept["where"]) == (experiment.title, experiment.where)
    tables = model(name)
    assert len(tables) == len(kept["model"]) > 0
    for (title, rows), old in zip(tables.items(), kept["model"], strict=True):
        assert title == old["title"]
        for row, numbers in zip(rows, old["rows"], strict=True):
            assert list(row) == old["headings"]
            assert list(map(shown, row.values())) == list(map(shown, numbers))


def test_a_simulated_step_by_hand():
    """80000 tokens on 8 GPUs: attention at 2512 GB/s; seven hops of 82 MB at 371 GB/s, each with call,
    round, latency and two overheads."""
    (row,), _ = latency((80_000,), (8,), 16, 128).values()
    shard = 80_000 * 2 * 2048 * 2 / 8
    attention, hop = shard / 2512e3, shard / 371e3 + 2.5 + 6.0 + 5.0 + 2 * 0.15
    assert row["attention, ms: simulated"] == pytest.approx(attention / 1e3)
    assert row["kv_ring, ms: simulated"] == pytest.approx((7 * hop + attention) / 1e3)


@pytest.mark.parametrize("series", PUBLISHED, ids=lambda series: series.machine)
def test_the_line_through_ring_minus_tree(series):
    slope, constant = np.polyfit(series.tokens, np.subtract(series.ring, series.tree), 1)
    hops = 9 * series.layers * (series.gpus - 1)
    sent = hops * 2 * series.heads * series.head_dim * 2 / series.gpus
    assert implied(series) == pytest.approx((constant, sent / slope / GB))
