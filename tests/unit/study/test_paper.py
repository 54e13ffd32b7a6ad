"""The paper's experiments: every number of the models worked out once more, from other formulas."""

from __future__ import annotations

import functools
import json
import math
import types
from pathlib import Path

import numpy as np
import pytest

from treeattn.study.paper import (
    EXPERIMENTS,
    Table,
    bandwidth,
    experiment,
    latency,
    llama,
    memory,
    shown,
    steps,
    volume,
)

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


def column(table, heading):
    return [row[table.headings.index(heading)] for row in table.rows]


# All of them


def test_the_experiments_in_the_order_of_the_paper():
    assert list(EXPERIMENTS) == ["steps", "bandwidth", "latency", "memory", "volume", "llama"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW if n == "latency" else ()) for n in EXPERIMENTS])
def test_the_page_explains_every_experiment_with_the_tables_of_today(name):
    """The committed tables, with which the page is filled, are those that the model gives now."""
    experiment = EXPERIMENTS[name]
    assert experiment.title
    assert experiment.where
    assert f"<!-- table paper_simulated.json:experiments/{name}/model/" in page()
    (kept,) = (entry for entry in COMMITTED if entry["name"] == name)
    assert (kept["title"], kept["where"]) == (experiment.title, experiment.where)
    tables = model(name)
    assert len(tables) == len(kept["model"]) > 0
    for table, old in zip(tables, kept["model"], strict=True):
        assert (table.title, list(table.headings)) == (old["title"], old["headings"])
        for row, numbers in zip(table.rows, old["rows"], strict=True):
            assert list(map(shown, row)) == list(map(shown, numbers))


def test_one_xgmi_link_explains_the_papers_mi300x():
    table, _ = llama.simulated([one for one in llama.PUBLISHED if one.machine == "4 MI300X"])
    for row in table.rows:
        assert row[-1] == pytest.approx(row[-2], rel=0.07)


def test_a_simulated_step_by_hand():
    """80000 tokens on 8 GPUs: attention at 2512 GB/s; seven hops of 82 MB at 371 GB/s, each with call,
    round, latency and two overheads."""
    table, _ = latency.model((80_000,), (8,), 16, 128)
    shard = 80_000 * 2 * 2048 * 2 / 8
    attention, hop = shard / 2512e3, shard / 371e3 + 2.5 + 6.0 + 5.0 + 2 * 0.15
    assert column(table, "attention, ms: simulated") == [pytest.approx(attention / 1e3)]
    assert column(table, "kv_ring, ms: simulated") == [pytest.approx((7 * hop + attention) / 1e3)]


def test_a_table_refuses_rows_that_do_not_fit():
    with pytest.raises(ValueError, match="1 cells under 2 headings"):
        Table("t", ("a", "b"), ((1,),))


# Latency


@pytest.mark.slow
def test_no_simulated_setting_comes_near_the_number_of_the_paper():
    table, what_8_takes = model("latency")
    ratios = column(table, "ring / tree: simulated")
    assert len(ratios) == 7 * 3
    assert min(ratios) > 20
    assert column(table, "ring / tree: paper") == ["in the figure"] * 20 + ["close to 8"]
    assert 3800 < ratios[-1] < 3900
    assert "about 3800" in page()
    ring, tree = (column(table, f"{name}, ms: simulated")[-1] for name in ("kv_ring", "hierarchical"))
    (((constant,),),) = (what_8_takes.rows,)
    assert (ring + constant) / (tree + constant) == pytest.approx(8)


@pytest.mark.parametrize(("gpus", "slowest"), [(8, 371), (128, 48)])
def test_long_contexts_tend_to_ranks_times_memory_over_link(gpus, slowest):
    table, _ = latency.model((10**12,), (gpus,), 16, 128)
    (ratio,) = column(table, "ring / tree: simulated")
    assert ratio == pytest.approx(gpus * 2512 / slowest, rel=0.02 + 1 / gpus)


@pytest.mark.parametrize(("gpus", "hops"), [(8, 14), (64, 20), (128, 22)])
def test_nccl_s_tree_is_a_chain_in_the_node(gpus, hops):
    assert steps.nccl_hops(gpus) == hops


# Bandwidth


def test_bandwidth_of_a_message_by_hand():
    """Overheads, latency, and bytes; of 1 KiB by small kernels, of 1 GiB by copies."""
    (table,) = model("bandwidth")
    tiers = ("within a node", "between nodes")
    (small, *_, large), (small_far, *_, large_far) = (
        column(table, f"{tier}, GB/s: simulated") for tier in tiers
    )
    assert small == pytest.approx(1024 / (1e3 * (1.0 + 2 * 0.15) + 1024 / 100), rel=0.01)
    assert small_far == pytest.approx(1024 / (1e3 * (4.5 + 2 * 0.75) + 1024 / 48), rel=0.01)
    assert (large, large_far) == (pytest.approx(371, rel=0.01), pytest.approx(48, rel=0.01))


@pytest.mark.parametrize(
    ("groups", "within", "between"),
    [
        (((0, 1), (2, 3)), (0, 1), (0, 2)),
        (((0, 2), (1, 3)), (0, 2), (0, 1)),
        (((0,), (1, 2)), (1, 2), (0, 1)),
        (((0,), (1,)), None, (0, 1)),
        (((0, 1, 2),), (0, 1), None),
        (((0,),), None, None),
    ],
)
def test_pairs_of_ranks(groups, within, between):
    assert bandwidth.pairs(groups) == {"within a node": within, "between nodes": between}


def test_fewer_messages_where_they_are_large(monkeypatch):
    asked = []
    monkeypatch.setattr(bandwidth, "ping_pong", lambda comm, pair, size, count: asked.append(count) or 1.0)
    monkeypatch.setattr(bandwidth.communicators, "node_groups", lambda comm: ((0, 1),))
    rank_0 = types.SimpleNamespace(rank=0)
    (table,) = bandwidth.measure(rank_0, sizes=(1, 100, 10_000), volume=1000, fewest=2, most=50)
    assert asked == [50, 10, 2]
    assert [row[2] for row in table.rows] == [1e-3, 0.1, 10.0]
    assert table.title.endswith("; this job has no two ranks between nodes")


# Memory


def test_the_gaps_of_section_6_2():
    table = model("memory")[0]
    assert column(table, "gap, MB: paper") == [524, 1040]
    gaps = [(2 * 64_000 * hidden - 2 * hidden // 128) * 2 / 1e6 for hidden in (2048, 4096)]
    assert gaps == pytest.approx([524.287936, 1048.575872])
    assert column(table, "gap, MB: model") == pytest.approx(gaps)
    assert "1048.58" in page("Peak memory")


def test_our_buffers_by_hand():
    """2 ranks, 10 tokens each, 3 heads of 4: shard 10 * 12 * 2 elements, records 3 * 6."""
    ring = sum(size for *_, size in memory.buffers("kv_ring", 2, 10, 3, 4))
    assert ring == 2 * 240 * 2 + 12 * 2 + 12 * 4 + 2 * 18 * 4 + 3 * 4
    tree = sum(size for *_, size in memory.buffers("binary_tree", 2, 10, 3, 4))
    assert tree == 240 * 2 + 12 * 2 + 18 * 4 + 18 * 4 + 12 * 4 + 3 * 4


@pytest.mark.parametrize(("ranks", "shards"), [(1, 1), (2, 2), (3, 3), (8, 3)])
def test_a_ring_of_three_holds_a_shard_more(ranks, shards):
    held = memory.buffers("kv_ring", ranks, 1000, 16, 128)
    assert sum(size for term, _, size in held if term == "2btd") == shards * 1000 * 2048 * 2 * 2


# Volume


def test_the_example_of_section_6_3():
    shard = 640_000 // 8 * 2 * 2048 * 2
    rows = {row[0]: row[-1] for row in model("volume")[0].rows}
    attention, hop = (
        rows[f"{what}, s: simulated"] for what in ("attention of a shard", "one hop to the next GPU")
    )
    assert attention == pytest.approx(shard / 2.512e12)
    assert round(attention * 1e6) == 261
    assert round(shard / 1e-5 / 1e12) == 66
    assert hop == pytest.approx(shard / 371e9, rel=0.02)
    assert round(hop / attention) == 7
    assert rows["ring, p hops: elements that a GPU sends"] == 2 * 80_000 * 2048 * 8
    assert rows["tree: elements that a GPU sends"] == 2 * 7 / 8 * (2048 + 32) == 3640
    assert "261 µs" in page()
    for said in ("66 TB/s", "7 times rather than 100"):
        assert said in page("Communication volume")


@pytest.mark.parametrize(
    ("scheme", "elements"),
    [
        ("kv_ring", 3 * 2 * 1000 * 2048),
        ("kv_ring:rotation=full", 4 * 2 * 1000 * 2048),
        ("binary_tree", 2 * 3 / 4 * (2048 + 2 * 16)),
    ],
)
def test_law_of_a_scheme(scheme, elements):
    assert volume.law(scheme, 4, 4000, 16, 128) == elements


# Steps


def test_steps_of_the_paper_s_numbers_of_gpus():
    table = model("steps")[0]
    depth = {(row[0], row[1]): row[2] for row in table.rows}
    rounds = {(row[0], row[1]): row[3] for row in table.rows}
    for ranks, log in ((8, 3), (64, 6), (128, 7)):
        assert depth[ranks, "k_nomial_tree"] == depth[ranks, "recursive_doubling"] == log
        assert rounds[ranks, "recursive_doubling"] == log
        assert rounds[ranks, "k_nomial_tree"] == 2 * log
        assert log < depth[ranks, "binary_tree"] < 2 * log
        assert depth[ranks, "chain"] == ranks - 1
    assert "22 messages" in page("Steps")


# Llama


@pytest.mark.parametrize("series", llama.PUBLISHED, ids=lambda series: series.machine)
def test_the_line_through_ring_minus_tree(series):
    slope, constant = np.polyfit(series.tokens, np.subtract(series.ring, series.tree), 1)
    hops = 9 * series.layers * (series.gpus - 1)
    sent = hops * 2 * series.heads * series.head_dim * 2 / series.gpus
    assert llama.implied(series) == pytest.approx((constant, sent / slope / GB))


def test_what_is_said_of_the_links():
    found = {series.machine: llama.implied(series) for series in llama.PUBLISHED}
    assert 0.8 * 371 < found["8 H100"][1] < 1.2 * 371
    assert 0.8 * 48 < found["4 MI300X"][1] < 1.2 * 48
    assert found["2 RTX 4090"][1] < 26 / 5
    assert round(found["8 H100"][0]) == 2


def test_prefill_and_decode_apart_by_hand():
    """32000 tokens of 8B parameters on 8 H100: arithmetic at 0.4 of 989 TFLOP/s; nine times the weights at
    2512 GB/s, and the simulated steps."""
    (series,) = (one for one in llama.PUBLISHED if one.machine == "8 H100")
    late, apart = llama.simulated([series])
    prefill = (2 * 8.03e9 * 32_000 + 2 * 32 * 4096 * 32_000**2) / (8 * 0.4 * 989e12)
    assert column(apart, "prefill, s: model")[0] == pytest.approx(prefill)
    tree, ring = (column(apart, f"nine tokens by {which}, s: simulated")[0] for which in ("tree", "ring"))
    assert ring - tree == pytest.approx(column(late, "ring minus tree, s: simulated")[0])
    assert 9 * 2 * 8.03e9 / 2512.5e9 < tree < 1.4 * 9 * 2 * 8.03e9 / 2512.5e9
    assert column(apart, "all by tree, s")[0] == pytest.approx(prefill + tree)


def test_what_is_said_of_256000_tokens():
    """Their prefill at the full peak takes what the paper says of everything."""
    (series,) = (one for one in llama.PUBLISHED if one.machine == "8 H100")
    at_peak = 0.4 * llama._prefill(series, 256_000)
    assert at_peak == pytest.approx(2.7, abs=0.05)
    assert series.tree[-1] == 2.89


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("wrong", [{"error_out": math.nan}, {"error_out": 2e-6}, {"same_bits": False}])
def test_a_result_that_is_wrong_in_one_block_stops_the_experiment(place, wrong):
    key = experiment.decode_key("ring", 2, 64, 4, 16)
    points = [{"error_out": 1e-7, "bound_out": 1e-6, "same_bits": True} for _ in range(2)]
    assert experiment._missed(key, points) == []
    points[place] |= wrong
    (problem,) = experiment._missed(key, points)
    assert "what a wrong result costs is not shown" in str(problem)
