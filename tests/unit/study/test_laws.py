"""The paper's laws, against its own numbers and against what our schedules send."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawn import examples
from treeattn import RestrictionError
from treeattn.collectives import build, check, names, needs_nodes
from treeattn.study import laws

HEADS, HEAD_DIM = 16, 128
WIDTH = HEAD_DIM + 2


def sent(schedule, records):
    """Elements that each rank sends: [ranks]."""
    elements: Counter[int] = Counter()
    for round_ in schedule.rounds:
        for transfer in round_:
            part = schedule.chunk_slice(transfer.chunks, records)
            elements[transfer.src] += (part.stop - part.start) * WIDTH
    return [elements[rank] for rank in range(schedule.size)]


# Volume


@pytest.mark.parametrize("scheme", ["ring", "reduce_scatter_gather"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_every_rank_sends_what_equation_14_says(scheme, ranks):
    assert set(sent(build(scheme, ranks), HEADS)) == {laws.tree_volume(1, HEADS, HEAD_DIM, ranks)}


THRIFTY = ["ring", "reduce_scatter_gather", "chain", "binary_tree", "k_nomial_tree", "double_binary_tree"]


@examples(100)
@given(st.sampled_from(THRIFTY), st.integers(1, 33), st.integers(1, 64))
def test_other_ranks_and_records_keep_equation_14_on_average(scheme, ranks, records):
    mean = Fraction(sum(sent(build(scheme, ranks), records)), ranks)
    assert mean == laws.tree_volume(1, records, HEAD_DIM, ranks)


@pytest.mark.parametrize("ranks", [2, 3, 8, 12])
def test_no_schedule_that_replicates_the_result_sends_less(ranks):
    for name in names("schedule"):
        nodes = {"nodes": f"{ranks // 2}+{ranks - ranks // 2}"} if needs_nodes(name) else {}
        try:
            schedule = build(name, ranks, **nodes)
        except RestrictionError:
            continue
        if schedule.result == "replicated":
            assert sum(sent(schedule, HEADS)) >= ranks * laws.tree_volume(1, HEADS, HEAD_DIM, ranks), name


@examples(100)
@given(st.integers(2, 128), st.integers(1, 10_000), st.integers(1, 8))
def test_ring_over_tree_is_tokens_times_d_over_d_plus_2h(ranks, shard, batch):
    """With the p - 1 hops that are enough, whatever the number of ranks: N d / (d + 2 n_h)."""
    ring = laws.ring_volume(batch, shard, HEADS, HEAD_DIM, hops=ranks - 1)
    tree = laws.tree_volume(batch, HEADS, HEAD_DIM, ranks)
    assert ring / tree == Fraction(shard * ranks * HEADS * HEAD_DIM, HEADS * WIDTH)


# Memory


def test_equations_8_and_9_by_hand():
    """b = 2, t = 10, d = 3 * 4, n_h = 3."""
    assert laws.ring_peak_memory(2, 10, 3, 4) == 4 * 2 * 10 * 12 + 2 * 2 * 12 == 1008
    assert laws.tree_peak_memory(2, 10, 3, 4) == 2 * 2 * 10 * 12 + 2 * 2 * 12 + 2 * 2 * 3 == 540


# Steps


@pytest.mark.parametrize("ranks", range(1, 34))
def test_a_binomial_tree_merges_in_the_steps_of_theorem_1(ranks):
    """One token per rank: the logarithm alone."""
    assert check(build("k_nomial_tree:radix=2", ranks)).depth == laws.reduction_steps(ranks, ranks)


def test_theorem_1_by_hand():
    assert laws.reduction_steps(8, 1) == 7
    assert laws.reduction_steps(8, 2) == 3 + 1
    assert laws.reduction_steps(9, 2) == 4 + 1
    assert laws.reduction_steps(8, 8) == 3
    assert laws.reduction_steps(5_120_000, 128) == 39_999 + 7
