"""What each algorithm promises beyond a right result: rounds, depth, messages, bytes, partners.

The schedules themselves are held by tests/golden/schedules.sha256.
"""

from collections import Counter
from functools import cache
from math import ceil, lcm, log2

import pytest
from catalog_variants import SIZES

from treeattn.collectives import build, check, names
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


#: What bine costs as its binomial twin does; its partners are nearer.
SAME = ("rounds", "depth", "messages", "volume", "determinism")


def doubled(p):
    return {"rounds": int(log2(p)) + 2 * (p & (p - 1) != 0), "depth": steps(p)}


#: Scheme -> by the number of ranks: what the certificate says; then the most and the least that a rank sends,
#: and the longest chain of messages (None: not promised).
LAWS = {
    "recursive_doubling": (doubled, None),
    "bine": (doubled, None),
    "bine:form=bandwidth": (
        lambda p: {fact: getattr(check(build("reduce_scatter_gather", p)), fact) for fact in SAME}, None
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


def test_uneven_nodes_of_many_sizes_round_their_cuts():
    """The least common multiple of these is beyond what a plan may have."""
    nodes = (2, 3, 5, 7, 11, 13, 17, 19)
    schedule = build("uneven_nodes", sum(nodes), nodes=nodes)
    assert schedule.chunks == TRANSFER_LIMIT < lcm(*nodes)
    assert check(schedule).determinism == "A"
