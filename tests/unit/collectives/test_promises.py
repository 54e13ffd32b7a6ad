"""What each algorithm promises beyond a right result: rounds, depth, messages, bytes, partners."""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import ceil, lcm, log, log2

import pytest
from catalog_variants import SIZES, cyclic

from treeattn.collectives import Schedule, build, check, names
from treeattn.collectives.catalog import CATALOG
from treeattn.collectives.schedule import TRANSFER_LIMIT
from treeattn.errors import RestrictionError

ROOTED = [row.name for row in CATALOG.values() if row.rooted]


def sent(schedule):
    """Rank -> what it sends, in multiples of one rank's records."""
    sums = Counter(dict.fromkeys(range(schedule.size), 0.0))
    for round_ in schedule.rounds:
        for t in round_:
            sums[t.src] += len(t.chunks) / schedule.chunks
    return sums


def one_after_the_other(schedule):
    """The longest chain of messages, in multiples of one rank's records: a rank sends, and receives, one at a
    time, but both at once, and starts a round when it is done with the last."""
    done = [0.0] * schedule.size
    for round_ in schedule.rounds:
        out, into, start = Counter(), Counter(), list(done)
        for t in round_:
            out[t.src] += len(t.chunks) / schedule.chunks
            into[t.dst] += len(t.chunks) / schedule.chunks
            start[t.dst] = max(start[t.dst], done[t.src])
        done = [start[rank] + max(out[rank], into[rank]) for rank in range(schedule.size)]
    return max(done)


def crossing(schedule, nodes):
    """The transfers between nodes."""
    node = {rank: index for index, ranks in enumerate(nodes) for rank in ranks}
    return [t for round_ in schedule.rounds for t in round_ if node[t.src] != node[t.dst]]


def rounds_of(schedule):
    return [[t.arrow for t in round_] for round_ in schedule.rounds]


def test_binary_tree_on_5_ranks_is_the_one_of_the_docs():
    assert rounds_of(build("binary_tree", 5)) == [
        ["3->1", "4->1"],
        ["1->0", "2->0"],
        ["0=>1", "0=>2"],
        ["1=>3", "1=>4"],
    ]


@pytest.mark.parametrize("name", names("schedule"))
def test_to_the_root_every_record_goes_up_once(name):
    """Of trees these are half the messages, and of all others those that rank 0's result is made of."""
    for size in SIZES:
        whole = build(name, size)
        if whole.result == "scattered":
            with pytest.raises(RestrictionError, match="scattered: no rank ends with all of it"):
                build(name, size, result="root")
            continue
        part = build(name, size, result="root")
        known = check(part)
        assert (part.name, part.result, known.determinism) == (whole.name, "root", "A")
        assert known.volume >= size - 1
        if part.chunks == 1:
            assert known.messages == size - 1
        if name in ROOTED:
            assert whole.rounds[: known.rounds] == part.rounds
            assert known.messages * 2 == whole.messages
        if name == "hierarchical":
            blocks = build(name, size, nodes=[[rank] for rank in range(size)], result="root")
            assert blocks.messages == size - 1


def test_k_ary_tree_trades_depth_for_fan_in():
    for radix, levels in ((2, 5), (4, 3), (8, 2), (62, 1)):
        known = check(build("k_ary_tree", 63, radix=radix))
        assert known.rounds == 2 * levels
        assert known.fan_in == radix


def test_k_nomial_tree_has_logarithmic_rounds_and_one_message_per_node():
    for radix in (2, 3, 4, 8):
        for size in (2, 27, 64):
            assert check(build("k_nomial_tree", size, radix=radix)).rounds == 2 * ceil(
                log(size, radix) - 1e-9
            )
    up = [t for round_ in build("k_nomial_tree", 64, radix=4).rounds for t in round_ if t.merge]
    crossing = [t for t in up if t.src // 16 != t.dst // 16]
    assert len(crossing) == 3


def test_recursive_doubling_rounds():
    for size in SIZES:
        known = check(build("recursive_doubling", size))
        assert known.rounds == int(log2(size)) + 2 * (size & (size - 1) != 0)
        assert known.depth == ceil(log2(size))
    assert rounds_of(build("recursive_doubling", 3)) == [["1->0"], ["0->2", "2->0"], ["0=>1"]]


def test_recursive_doubling_keeps_early_rounds_on_nodes_of_a_power_of_two():
    schedule = build("recursive_doubling", 12)
    crossing = [sum(t.src // 4 != t.dst // 4 for t in round_) for round_ in schedule.rounds]
    assert crossing[0] == crossing[-1] == 0, "folding pairs are neighbours on one node"


def test_recursive_multiplying_takes_one_round_per_factor():
    assert check(build("recursive_multiplying", 24, factors=(4, 3, 2))).rounds == 3
    assert check(build("recursive_multiplying", 27, factors=(4, 3, 2))).rounds == 5
    assert check(build("recursive_multiplying", 64)).rounds == 3  # 4 * 4 * 4
    assert check(build("recursive_multiplying", 7)).rounds == 1
    assert check(build("recursive_multiplying", 13)).rounds == 4  # 3 * 4 and a fold
    first = build("recursive_multiplying", 24, factors=(4, 3, 2)).rounds[0]
    assert all(t.src // 4 == t.dst // 4 for t in first), "the first factor is the nearest"


def test_ring_and_rabenseifner_send_the_least_bytes():
    for name in ("ring", "reduce_scatter_gather"):
        assert check(build(name, 16)).volume == pytest.approx(2 * 15)
    sent = Counter(t.src for round_ in build("ring", 9).rounds for t in round_)
    assert set(sent.values()) == {16}


def test_reduce_scatter_gather_near_sends_small_messages_far():
    def crossing_volume(order):
        schedule = build("reduce_scatter_gather", 16, order=order)
        crossing = [t for round_ in schedule.rounds for t in round_ if t.src // 4 != t.dst // 4]
        return sum(len(t.chunks) for t in crossing) / schedule.chunks

    assert check(build("reduce_scatter_gather", 16, order="near")).rounds == 8
    assert crossing_volume("near") == crossing_volume("far") / 4


def test_double_binary_tree_loads_every_rank_with_one_message_each_way():
    for size in (*SIZES, 64, 100):
        for chunks in (1, 4):
            for round_ in build("double_binary_tree", size, chunks=chunks).rounds:
                assert max(Counter(t.src for t in round_).values()) == 1
                assert max(Counter(t.dst for t in round_).values()) == 1


def test_double_binary_tree_makes_no_rank_inner_twice():
    for size in (*SIZES, 64, 100):
        rounds = build("double_binary_tree", size).rounds
        inner = [
            {t.dst for round_ in rounds for t in round_ if t.merge and tree in t.chunks} for tree in (0, 1)
        ]
        assert not inner[0] & inner[1]
        children = Counter((t.dst, t.chunks) for round_ in rounds for t in round_ if t.merge)
        assert max(children.values(), default=0) <= 2


def test_double_binary_tree_pipelines_in_twice_the_depth():
    rounds = [check(build("double_binary_tree", 64, chunks=chunks)).rounds for chunks in (1, 2, 8)]
    assert [rounds[1] - rounds[0], rounds[2] - rounds[0]] == [4, 28], "four rounds per further chunk"
    assert rounds[0] <= 4 * 7


def test_hierarchical_sends_between_leaders_only():
    nodes = cyclic(3, 10)
    node = {rank: index for index, ranks in enumerate(nodes) for rank in ranks}
    schedule = build("hierarchical:inner=(k_nomial_tree:radix=4):outer=ring", 10, nodes=nodes)
    crossing = [t for round_ in schedule.rounds for t in round_ if node[t.src] != node[t.dst]]
    assert {rank for t in crossing for rank in (t.src, t.dst)} == {0, 1, 2}
    assert len(crossing) == build("ring", 3).messages
    assert schedule.chunks == 3


def test_split_rail_spreads_what_crosses_over_the_rails():
    schedule = build("split_rail", 16, nodes=(4, 4, 4, 4))
    crossing = [t for round_ in schedule.rounds for t in round_ if t.src // 4 != t.dst // 4]
    assert all(t.src % 4 == t.dst % 4 for t in crossing)
    assert all(len(t.chunks) / schedule.chunks == 1 / 4 for t in crossing)
    assert check(schedule).rounds == 2 + 2


def test_split_rail_has_as_many_rails_as_the_smallest_node():
    assert build("split_rail", 9, nodes=(4, 2, 3)).chunks == 2


def test_head_scatter_is_optimal_in_rounds_and_bytes():
    for size in (*SIZES, 100):
        schedule = build("head_scatter", size)
        known = check(schedule)
        assert schedule.result == "scattered"
        assert known.rounds == ceil(log2(size))
        assert known.volume == pytest.approx(size - 1)


def test_all_gather_merge_is_one_round():
    known = check(build("all_gather_merge", 9))
    assert (known.rounds, known.messages, known.fan_in) == (1, 72, 8)


# Butterflies and circulant graphs


def test_circulant_takes_the_least_rounds_and_bytes_whatever_the_number_of_ranks():
    for size in (*SIZES, 100, 255):
        schedule = build("circulant", size)
        known, steps = check(schedule), ceil(log2(size))
        assert known.rounds == 2 * steps
        assert known.depth == steps
        assert known.messages == 2 * (size - 1) * (steps + 1)
        assert list(sent(schedule).values()) == pytest.approx([2 * (size - 1) / size] * size)
        assert one_after_the_other(schedule) == pytest.approx(2 * (size - 1) / size)


def test_circulant_on_3_ranks():
    assert [[(t.arrow, t.chunks) for t in round_] for round_ in build("circulant", 3).rounds[:2]] == [
        [("0->2", range(2, 3)), ("1->0", range(1)), ("2->1", range(1, 2))],
        [("0->1", range(1, 2)), ("1->2", range(2, 3)), ("2->0", range(1))],
    ]


def distance(t, size):
    """Around a ring of all ranks."""
    return min((t.src - t.dst) % size, (t.dst - t.src) % size)


def test_bine_partners_are_two_thirds_as_far():
    for form, order in (("latency", reversed), ("bandwidth", list)):
        rounds = build("bine", 64, form=form).rounds[:6]
        met = [{distance(t, 64) for t in round_} for round_ in rounds]
        assert met == list(order([{1}, {1}, {3}, {5}, {11}, {21}]))
    ours, theirs = (
        sum(distance(t, 256) for round_ in build(name, 256).rounds for t in round_)
        for name in ("bine", "recursive_doubling")
    )
    assert ours / theirs == pytest.approx(2 / 3, abs=0.01)


@pytest.mark.parametrize("ranks", [12, 20, 40])
def test_bine_sends_less_between_groups_that_are_no_power_of_two(ranks):
    groups = [range(first, min(first + ranks, 128)) for first in range(0, 128, ranks)]

    def between(name, **params):
        schedule = build(name, 128, **params)
        return sum(len(t.chunks) for t in crossing(schedule, groups)) / schedule.chunks

    assert between("bine") < between("recursive_doubling")
    assert between("bine", form="bandwidth") < between("reduce_scatter_gather", order="far") / 5


def test_bine_costs_what_its_binomial_twins_cost():
    for size in SIZES:
        for form, twin in (("latency", "recursive_doubling"), ("bandwidth", "reduce_scatter_gather")):
            ours, theirs = check(build("bine", size, form=form)), check(build(twin, size))
            for fact in ("rounds", "depth", "messages", "volume", "determinism"):
                assert getattr(ours, fact) == getattr(theirs, fact)


def test_bine_near_first_is_exact_but_its_bits_would_differ():
    schedule = build("bine", 16)
    assert check(schedule).determinism == "A"
    near_first = Schedule("near first", 16, 1, schedule.rounds[::-1])
    assert check(near_first).determinism == "none"


def test_elimination_takes_no_round_for_ranks_beyond_a_power_of_two():
    for size in (*SIZES, 48, 63, 96, 127, 255):
        schedule = build("elimination", size)
        known = check(schedule)
        assert known.rounds == 2 * int(log2(size))
        assert known.volume == pytest.approx(2 * (size - 1)), "the least there is"
        assert known.fan_in <= 2
        assert max(sent(schedule).values()) < 3
        assert one_after_the_other(schedule) <= 3
        folding = build("reduce_scatter_gather", size)
        if size & (size - 1):
            assert check(folding).rounds == known.rounds + 2
            assert one_after_the_other(schedule) < one_after_the_other(folding)
        else:
            assert one_after_the_other(schedule) == one_after_the_other(folding)


def test_elimination_counts():
    """Every group that is eliminated once sends, and is sent, as many messages again as it has ranks."""
    for size in SIZES:
        groups, ranks, messages = size, 1, 0
        while groups > 1:
            messages += 2 * (size_at_work := (groups - groups % 2 * 3) * ranks) + 8 * ranks * (groups % 2)
            assert size_at_work >= 0
            groups, ranks = groups // 2, 2 * ranks
        assert build("elimination", size).messages == messages


def test_elimination_is_nearly_free_for_three_times_a_power_of_two():
    for size in (6, 12, 24, 48, 96):
        assert one_after_the_other(build("elimination", size)) == pytest.approx(2)


def test_all_gather_trees_sends_much_to_neighbours_and_little_far():
    for size in (*SIZES, 64, 100):
        schedule = build("all_gather_trees", size)
        known, steps = check(schedule), ceil(log2(size))
        assert known.rounds == 2 * steps
        assert known.depth == steps
        assert list(sent(schedule).values()) == pytest.approx([2 * (size - 1) / size] * size)
        for step, round_ in enumerate(schedule.rounds[:steps]):
            assert {(t.src - t.dst) % size for t in round_} == {1 << step}
        chunks = [sum(len(t.chunks) for t in round_) for round_ in schedule.rounds[:steps]]
        assert chunks == sorted(chunks, reverse=True)
    assert build("all_gather_trees", 64).messages == 2 * 64 * 6, "one for each partner"
    assert build("all_gather_trees", 12).messages == 2 * 12 * 4
    for size in SIZES:
        assert build("all_gather_trees", size).messages <= 2 * size * (size - 1)


# Trees


def informed(schedule, latency, overhead, gap):
    """When the last rank has the result, in the LogP model: what is copied down, from time 0."""
    at = {0: 0}
    free = {0: 0}
    for round_ in schedule.rounds[len(schedule.rounds) // 2 :]:
        for t in round_:
            assert not t.merge
            at[t.dst] = free[t.dst] = free[t.src] + latency + 2 * overhead
            free[t.src] += max(gap, overhead)
    assert len(at) == schedule.size
    return max(at.values())


@pytest.mark.parametrize(
    ("latency", "overhead", "gap"), [(1600, 200, 500), (6, 2, 4), (0, 0, 1), (1, 0, 1), (3, 5, 1), (2, 0, 50)]
)
def test_logp_optimal_is_soonest_done(latency, overhead, gap):
    delivery, interval = latency + 2 * overhead, max(gap, overhead)

    @cache
    def reached(time):  # how many ranks can have the result, by any tree
        if time < delivery or not delivery:
            return 1
        return (reached(time - interval) if time >= interval else 1) + reached(time - delivery)

    for size in SIZES:
        schedule = build("logp_optimal", size, latency=latency, overhead=overhead, gap=gap)
        last = informed(schedule, latency, overhead, gap)
        if delivery:
            assert last == next(time for time in range(10**6) if reached(time) >= size)
        assert check(schedule).rounds <= 2 * (size - 1)


def test_logp_optimal_of_the_paper():
    """Figure 3 there: 8 ranks, L = 6, g = 4, o = 2, done at 24."""
    assert informed(build("logp_optimal", 8, latency=6, overhead=2, gap=4), 6, 2, 4) == 24


def test_logp_optimal_becomes_the_binomial_tree_and_the_star():
    def edges(schedule):
        return {(t.src, t.dst) for round_ in schedule.rounds for t in round_ if t.merge}

    for size in (2, 4, 16, 64):
        ours = build("logp_optimal", size, latency=1, overhead=0, gap=1)
        assert edges(ours) == edges(build("k_nomial_tree", size))
    assert check(build("logp_optimal", 40, latency=10**6)).rounds == 2


def test_logp_optimal_numbers_a_subtree_in_a_run():
    schedule = build("logp_optimal", 50)
    below = {rank: [rank] for rank in range(50)}
    for round_ in schedule.rounds:
        for t in round_:
            if t.merge:
                below[t.dst] += below[t.src]
    for ranks in below.values():
        assert sorted(ranks) == list(range(min(ranks), max(ranks) + 1))


# Rails


@pytest.mark.parametrize("leaders", [1, 2, 3, 4, 8])
def test_multi_leader_shares_what_crosses_among_its_leaders(leaders):
    nodes = [range(first, first + 4) for first in range(0, 16, 4)]
    schedule = build("multi_leader", 16, leaders=leaders, nodes=nodes)
    known = check(schedule)
    rail = build("recursive_doubling", 4)
    between = crossing(schedule, nodes)
    assert len(between) == leaders * rail.messages
    assert all(len(t.chunks) / schedule.chunks == 1 / leaders for t in between)
    assert {t.src % 4 for t in between} == set(range(min(leaders, 4)))
    assert known.rounds == 2 + len(rail.rounds)
    assert known.messages == 4 * 2 * leaders * 3 + leaders * rail.messages
    assert known.volume == pytest.approx(4 * 2 * 3 + rail.messages)


def test_multi_leader_lies_between_hierarchical_and_split_rail():
    nodes = (4, 4, 4)
    assert (
        build("multi_leader", 12, leaders=4, nodes=nodes).rounds
        == build("split_rail", 12, nodes=nodes).rounds
    )
    one = build("multi_leader", 12, leaders=1, nodes=nodes)
    flat = build("hierarchical:inner=(k_ary_tree:radix=12)", 12, nodes=nodes)
    assert one.rounds == flat.rounds


def test_uneven_nodes_has_every_rank_own_an_equal_share_of_its_node():
    nodes = ((0, 1, 2, 3), (4, 5, 6), (7, 8))
    schedule = build("uneven_nodes", 9, nodes=nodes)
    assert schedule.chunks == lcm(4, 3, 2)
    for node in nodes:
        for rank in node:
            owned = {c for t in schedule.rounds[0] if t.dst == rank for c in t.chunks}
            assert len(owned) == schedule.chunks / len(node)
    between = crossing(schedule, nodes)
    assert {t.src for t in between} == set(range(9)), "every rank takes part"
    assert {t.src for t in crossing(build("split_rail", 9, nodes=nodes), nodes)} != set(range(9))
    assert sum(len(t.chunks) for t in between) / schedule.chunks == build("recursive_doubling", 3).messages
    assert check(schedule).rounds == 2 + len(build("recursive_doubling", 3).rounds)


def test_uneven_nodes_sends_less_from_the_busiest_rank_than_split_rail():
    nodes = (8, 8, 7, 1)
    ours, theirs = (
        max(sent(build(name, 24, nodes=nodes)).values()) for name in ("uneven_nodes", "split_rail")
    )
    assert ours < theirs / 2


def test_uneven_nodes_is_split_rail_on_even_nodes():
    assert (
        build("uneven_nodes", 12, nodes=(4, 4, 4)).rounds == build("split_rail", 12, nodes=(4, 4, 4)).rounds
    )


def test_uneven_nodes_of_many_sizes_round_their_cuts():
    """The least common multiple of these is beyond what a plan may have."""
    nodes = (2, 3, 5, 7, 11, 13, 17, 19)
    schedule = build("uneven_nodes", sum(nodes), nodes=nodes)
    assert schedule.chunks == TRANSFER_LIMIT < lcm(*nodes)
    assert check(schedule).determinism == "A"
