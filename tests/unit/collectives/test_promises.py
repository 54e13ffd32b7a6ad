"""What each algorithm promises beyond a right result: rounds, depth, messages, bytes, partners."""

from collections import Counter
from functools import cache
from math import ceil, lcm, log2

import pytest
from catalog_variants import SIZES

from treeattn.collectives import Schedule, build, check, names
from treeattn.collectives.catalog import CATALOG
from treeattn.collectives.schedule import TRANSFER_LIMIT
from treeattn.errors import RestrictionError


def steps(p):
    return ceil(log2(p))


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


#: Scheme -> by the number of ranks: what the certificate says; then the most and the least that a rank sends,
#: and the longest chain of messages (None: not promised).
LAWS = {
    "recursive_doubling": (
        lambda p: {"rounds": int(log2(p)) + 2 * (p & (p - 1) != 0), "depth": steps(p)}, None
    ),
    "head_scatter": (lambda p: {"rounds": steps(p), "volume": p - 1}, None),
    "all_gather_merge": (lambda p: {"rounds": int(p > 1), "messages": p * (p - 1), "fan_in": p - 1}, None),
    "circulant": (
        lambda p: {"rounds": 2 * steps(p), "depth": steps(p), "messages": 2 * (p - 1) * (steps(p) + 1)},
        lambda p: (2 * (p - 1) / p,) * 3,
    ),
    "all_gather_trees": (
        lambda p: {"rounds": 2 * steps(p), "depth": steps(p)}, lambda p: (2 * (p - 1) / p,) * 2 + (None,)
    ),
    "ring": (lambda p: {"rounds": 2 * (p - 1), "volume": 2 * (p - 1)}, lambda p: (2 * (p - 1) / p,) * 3),
    "elimination": (lambda p: {"rounds": 2 * int(log2(p)), "volume": 2 * (p - 1)}, None),
}  # fmt: skip


@pytest.mark.parametrize("scheme", LAWS)
def test_laws_of_any_number_of_ranks(scheme):
    said, loads = LAWS[scheme]
    for size in (*SIZES, 100):
        schedule = build(scheme, size)
        known = check(schedule)
        for fact, wanted in said(size).items():
            assert getattr(known, fact) == pytest.approx(wanted), (fact, size)
        if loads and size > 1:
            loaded = sent(schedule).values()
            found = max(loaded), min(loaded), one_after_the_other(schedule)
            for one, wanted in zip(found, loads(size), strict=True):
                assert wanted is None or one == pytest.approx(wanted), size


# Scheme, ranks, and what the certificate says.
POINTS = [
    *((f"k_ary_tree:radix={radix}", 63, {"rounds": 2 * levels, "fan_in": radix})
      for radix, levels in ((2, 5), (4, 3), (8, 2), (62, 1))),
    *((f"k_nomial_tree:radix={radix}", size, {"rounds": rounds})
      for radix, size, rounds in ((2, 27, 10), (2, 64, 12), (3, 27, 6), (4, 64, 6), (8, 64, 4), (8, 2, 2))),
    ("recursive_multiplying:factors=4+3+2", 24, {"rounds": 3}),
    ("recursive_multiplying:factors=4+3+2", 27, {"rounds": 5}),
    ("recursive_multiplying", 64, {"rounds": 3}),  # 4 * 4 * 4
    ("recursive_multiplying", 7, {"rounds": 1}),
    ("recursive_multiplying", 13, {"rounds": 4}),  # 3 * 4 and a fold
    ("reduce_scatter_gather:order=near", 16, {"rounds": 8}),
    ("logp_optimal:latency=1000000", 40, {"rounds": 2}),  # a star
    ("all_gather_trees", 64, {"messages": 2 * 64 * 6}),  # one for each partner
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "size", "said"), POINTS)
def test_points_by_hand(scheme, size, said):
    known = check(build(scheme, size))
    assert {fact: getattr(known, fact) for fact in said} == said


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
        if CATALOG[name].rooted:
            assert whole.rounds[: known.rounds] == part.rounds
            assert known.messages * 2 == whole.messages
        if name == "hierarchical":
            blocks = build(name, size, nodes=[[rank] for rank in range(size)], result="root")
            assert blocks.messages == size - 1


def test_double_binary_tree_loads_every_rank_once_and_pipelines():
    for size in (*SIZES, 64, 100):
        for chunks in (1, 4):
            for round_ in build("double_binary_tree", size, chunks=chunks).rounds:
                assert max(Counter(t.src for t in round_).values()) == 1
                assert max(Counter(t.dst for t in round_).values()) == 1
        rounds = build("double_binary_tree", size).rounds
        inner = [
            {t.dst for round_ in rounds for t in round_ if t.merge and tree in t.chunks} for tree in (0, 1)
        ]
        assert not inner[0] & inner[1], "no rank is inner twice"
    rounds = [check(build("double_binary_tree", 64, chunks=chunks)).rounds for chunks in (1, 2, 8)]
    assert [rounds[1] - rounds[0], rounds[2] - rounds[0]] == [4, 28], "four rounds per further chunk"
    assert rounds[0] <= 4 * 7


# Butterflies


def distance(t, size):
    """Around a ring of all ranks."""
    return min((t.src - t.dst) % size, (t.dst - t.src) % size)


def test_bine_costs_what_its_binomial_twins_cost_and_its_partners_are_two_thirds_as_far():
    for size in SIZES:
        for form, twin in (("latency", "recursive_doubling"), ("bandwidth", "reduce_scatter_gather")):
            ours, theirs = check(build("bine", size, form=form)), check(build(twin, size))
            for fact in ("rounds", "depth", "messages", "volume", "determinism"):
                assert getattr(ours, fact) == getattr(theirs, fact)
    for form, order in (("latency", reversed), ("bandwidth", list)):
        rounds = build("bine", 64, form=form).rounds[:6]
        met = [{distance(t, 64) for t in round_} for round_ in rounds]
        assert met == list(order([{1}, {1}, {3}, {5}, {11}, {21}]))
    for ranks in (12, 20, 40):  # groups that are no power of two
        groups = [range(first, min(first + ranks, 128)) for first in range(0, 128, ranks)]
        ours, theirs = (len(crossing(build(name, 128), groups)) for name in ("bine", "recursive_doubling"))
        assert ours < theirs
    near_first = Schedule("near first", 16, 1, build("bine", 16).rounds[::-1])
    assert check(near_first).determinism == "none"  # exact, but its bits would differ


def test_elimination_takes_no_round_for_ranks_beyond_a_power_of_two():
    for size in (*SIZES, 48, 96, 127):
        schedule, folding = build("elimination", size), build("reduce_scatter_gather", size)
        assert check(schedule).fan_in <= 2
        assert max(sent(schedule).values()) < 3
        ours, theirs = map(one_after_the_other, (schedule, folding))
        assert ours <= 3
        assert (ours < theirs) if size & (size - 1) else (ours == theirs)
    for size in (6, 12, 24, 48, 96):
        assert one_after_the_other(build("elimination", size)) == pytest.approx(2)


def test_all_gather_trees_sends_much_to_neighbours_and_little_far():
    for size in SIZES:
        rounds = build("all_gather_trees", size).rounds[: steps(size)]
        assert [{(t.src - t.dst) % size for t in round_} for round_ in rounds] == [
            {1 << step} for step in range(len(rounds))
        ]
        chunks = [sum(len(t.chunks) for t in round_) for round_ in rounds]
        assert chunks == sorted(chunks, reverse=True)


# Trees


def informed(schedule, latency, overhead, gap):
    """When the last rank has the result, in the LogP model: what is copied down, from time 0."""
    at, free = {0: 0}, {0: 0}
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
    # Figure 3 of the paper: 8 ranks, L = 6, g = 4, o = 2, done at 24.
    assert informed(build("logp_optimal", 8, latency=6, overhead=2, gap=4), 6, 2, 4) == 24


def test_logp_optimal_numbers_a_subtree_in_a_run():
    below = {rank: [rank] for rank in range(50)}
    for round_ in build("logp_optimal", 50).rounds:
        for t in round_:
            if t.merge:
                below[t.dst] += below[t.src]
    for ranks in below.values():
        assert sorted(ranks) == list(range(min(ranks), max(ranks) + 1))


# Nodes and rails


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


def test_rails_on_even_nodes_are_one_scheme():
    """With as many rails as the smallest node has ranks."""
    nodes = (4, 4, 4)
    rails = build("split_rail", 12, nodes=nodes)
    assert all(t.src % 4 == t.dst % 4 for t in crossing(rails, [range(n, n + 4) for n in (0, 4, 8)]))
    assert build("multi_leader", 12, leaders=4, nodes=nodes).rounds == rails.rounds
    assert build("uneven_nodes", 12, nodes=nodes).rounds == rails.rounds
    one = build("multi_leader", 12, leaders=1, nodes=nodes)
    assert one.rounds == build("hierarchical:inner=(k_ary_tree:radix=12)", 12, nodes=nodes).rounds
    assert build("split_rail", 9, nodes=(4, 2, 3)).chunks == 2


def test_uneven_nodes_has_every_rank_own_an_equal_share_of_its_node():
    nodes = ((0, 1, 2, 3), (4, 5, 6), (7, 8))
    schedule, rail = build("uneven_nodes", 9, nodes=nodes), build("recursive_doubling", 3)
    assert schedule.chunks == lcm(4, 3, 2)
    for node in nodes:
        for rank in node:
            owned = {c for t in schedule.rounds[0] if t.dst == rank for c in t.chunks}
            assert len(owned) == schedule.chunks / len(node)
    between = crossing(schedule, nodes)
    assert {t.src for t in between} == set(range(9)), "every rank takes part"
    assert {t.src for t in crossing(build("split_rail", 9, nodes=nodes), nodes)} != set(range(9))
    assert sum(len(t.chunks) for t in between) / schedule.chunks == rail.messages
    assert check(schedule).rounds == 2 + len(rail.rounds)
    ours, theirs = (
        max(sent(build(name, 24, nodes=(8, 8, 7, 1))).values()) for name in ("uneven_nodes", "split_rail")
    )
    assert ours < theirs / 2


def test_uneven_nodes_of_many_sizes_round_their_cuts():
    """The least common multiple of these is beyond what a plan may have."""
    nodes = (2, 3, 5, 7, 11, 13, 17, 19)
    schedule = build("uneven_nodes", sum(nodes), nodes=nodes)
    assert schedule.chunks == TRANSFER_LIMIT < lcm(*nodes)
    assert check(schedule).determinism == "A"
