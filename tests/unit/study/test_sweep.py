"""What is measured, in which order, and how many messages that is."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from treeattn import collectives
from treeattn.collectives.runtime.reducer import Sent
from treeattn.study.compare import measure
from treeattn.study.compare.measure import Effort
from treeattn.study.compare.sweep import Block, Sweep, keys

LISTS = {
    "ranks": [4], "what": ["reduce", "decode"], "batch": [1], "queries": [1], "heads": [16], "kv_heads": [0],
    "head_dim": [128], "dtype": ["bfloat16"], "wire": ["float32"], "arrivals": ["together"],
    "tokens": [100, 200],
}  # fmt: skip


def test_a_reduction_has_no_length():
    found = keys(["ring", "chain"], **LISTS)
    assert [(key.what, key.tokens, key.scheme) for key in found] == [
        ("reduce", 0, "ring"), ("reduce", 0, "chain"),
        ("decode", 100, "ring"), ("decode", 100, "chain"), ("decode", 200, "ring"), ("decode", 200, "chain"),
    ]  # fmt: skip
    assert all(key.kv_heads == 16 for key in found)


def test_rings_have_no_reduction_of_their_own():
    found = keys(["kv_ring:rotation=full", "ring"], **LISTS)
    assert [key.scheme for key in found if key.what == "reduce"] == ["ring"]


def sweep(found, **changes):
    return Sweep(found, **{"effort": Effort(20), "launch": 1, "seed": 0, "done": {}, **changes})


def test_schemes_change_places_in_each_repetition():
    found = keys(["ring", "chain", "binary_tree"], **{**LISTS, "what": ["reduce"]})
    blocks = sweep(found).blocks(found)
    orders = [tuple(block.key.scheme for block in blocks[i : i + 3]) for i in range(0, 60, 3)]
    assert len(set(orders)) > 3
    assert blocks == sweep(found).blocks(found)  # the same on every rank
    assert blocks != sweep(found, launch=2).blocks(found)
    assert set(blocks) == {Block(key, repetition) for key in found for repetition in range(20)}


@pytest.mark.parametrize(
    ("slowest", "iterations"),
    [(1e-6, 200), (1e-3, 30), (0.01, 20), (0.05, 10), (1.0, 3)],
)
def test_blocks_have_enough_iterations_where_patience_lasts(slowest, iterations):
    """10 blocks in 0.3 seconds, else of 20 iterations in 5 seconds, else of 3."""
    assert Effort(10, 200, 0.3, 10.0).count(slowest) == iterations
    assert Effort(10, 7, 0.3, 10.0).count(slowest) == min(iterations, 7)


def test_a_case_ends_where_nothing_is_left_to_ask():
    """It is looked before the first block and after 8, 16, 32 .. repetitions."""

    class Bench:
        comm, loop = SimpleNamespace(rank=0, bcast=lambda told: told), SimpleNamespace(agree_on_slowest=float)

        def problem(self, key):
            return None

        def block(self, key, problem, memory):
            return {}

    found = keys(["ring", "chain"], **{**LISTS, "what": ["reduce"]})
    answers = iter([set(), {found[0]}, set(found), set(found)])
    one = sweep(found, effort=Effort(40, stop_early=True), answered=lambda case: next(answers))
    counted = Counter(block.key for block, point in one._run_case(Bench(), one.blocks(found)) if point)
    assert counted == {found[0]: 8, found[1]: 16}


def test_what_is_done_is_not_done_again():
    found = keys(["ring", "chain"], **{**LISTS, "what": ["reduce"]})
    done = dict.fromkeys(sweep(found).blocks(found)[:7], 5.0)
    left = sweep(found, done=done).blocks(found)
    assert len(left) == 33
    assert not done.keys() & set(left)


def test_payload_of_eq_14():
    """A ring sends 2 (p - 1) / p of the records from each rank when p divides them."""
    for scheme in ("ring", "reduce_scatter_gather"):
        counted = measure.scheduled_tiers(collectives.build(scheme, 4), 16, 130 * 4, ((0, 1), (2, 3)))
        assert counted["intra"][1] + counted["inter"][1] == 2 * 3 * 16 * 130 * 4
        assert counted["inter"][1] > 0


@pytest.mark.parametrize(
    ("sent", "groups", "tiers"),
    [
        ([[(1, 10), (2, 20)], [(0, 5)], []], ((0, 1), (2,)), {"intra": [2, 15], "inter": [1, 20]}),
        ([Sent(None, 7)] * 3, ((0, 1, 2),), {"intra": [None, 21], "inter": [0, 0]}),
        ([Sent(None, 7)] * 3, ((0, 2), (1,)), {"intra": [0, 0], "inter": [0, 0], "unknown": [None, 21]}),
        ([None, None, None], ((0, 1, 2),), None),
    ],
)
def test_what_was_handed_over_by_tier(sent, groups, tiers):
    class Ranks:
        def allgather(self, mine):
            return sent

    assert measure.handed_over(Ranks(), sent[0], groups) == tiers


def test_chunks_without_rows_are_not_sent():
    counted = measure.scheduled_tiers(collectives.build("ring", 4), 1, 520, ((0, 1, 2, 3),))
    assert counted == {"intra": [6, 6 * 520], "inter": [0, 0]}
