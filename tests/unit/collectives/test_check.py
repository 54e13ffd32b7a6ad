"""The proof: what it accepts, what it refuses and in which words, and against a checker of a few lines."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from catalog_variants import VARIANTS, built
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawn import examples, sample
from tests.support.refusals import refused
from tests.support.schedules import accepted, drawn_schedules, mutated
from treeattn.collectives import (
    Fold,
    Schedule,
    Transfer,
    build,
    check,
    on_chunks,
    on_ranks,
    prove,
    reversed_as_copies,
    side_by_side,
    then,
    to_root,
)
from treeattn.collectives.provenance import ChunkMap, Expressions, aligned
from treeattn.errors import ScheduleError


def plain_check(schedule):
    """Exactly once, with counters per (rank, chunk) and no other idea: the oracle of this file."""
    held = {(r, c): Counter([r]) for r in range(schedule.size) for c in range(schedule.chunks)}
    for round_ in schedule.rounds:
        before = dict(held)
        writes = Counter((t.dst, c) for t in round_ for c in t.chunks)
        for t in round_:
            if t.src == t.dst or not t.chunks:
                return False
            for c in t.chunks:
                sent = before[t.src, c]
                if not t.merge and writes[t.dst, c] > 1:
                    return False
                held[t.dst, c] = held[t.dst, c] + sent if t.merge else sent
                if max(held[t.dst, c].values()) > 1:
                    return False
    promised = ((r, c) for r in range(schedule.size) for c in schedule.promised(r))
    return all(len(held[key]) == schedule.size for key in promised)


CATALOGUED = st.builds(built, st.sampled_from(VARIANTS), st.integers(2, 12))
RANDOMS = st.randoms(use_true_random=False)


# What it accepts


@pytest.mark.slow
@given(st.one_of(CATALOGUED, CATALOGUED, drawn_schedules(st.integers(2, 8))), st.integers(0, 3), st.data())
@examples(600)
def test_it_agrees_with_counting_whatever_is_changed(schedule, changes, data):
    for _ in range(changes):
        schedule = data.draw(mutated(schedule))
    assert accepted(schedule) == plain_check(schedule)


def test_it_agrees_with_counting_on_schedules_from_nothing():
    """Small ones, most of them wrong."""
    rng = random.Random(7)
    verdicts = Counter()
    for _ in range(5000):
        size, chunks = rng.randint(2, 3), rng.randint(1, 2)
        rounds = []
        for _ in range(rng.randint(1, 3)):
            pairs = [rng.sample(range(size), 2) for _ in range(rng.randint(1, 3))]
            starts = [rng.randrange(chunks) for _ in pairs]
            ends = [rng.randint(start + 1, chunks) for start in starts]
            rounds.append(
                tuple(
                    Transfer(*pair, range(start, end), rng.random() < 0.6)
                    for pair, start, end in zip(pairs, starts, ends, strict=True)
                )
            )
        schedule = Schedule("random", size, chunks, tuple(rounds))
        assert accepted(schedule) == plain_check(schedule), schedule
        verdicts[accepted(schedule)] += 1
    assert min(verdicts[True], verdicts[False]) > 20


@given(CATALOGUED, RANDOMS)
@examples(200)
def test_no_transfer_of_the_catalogue_may_lack_or_come_twice(schedule, rng):
    i = rng.randrange(len(schedule.rounds))
    j = rng.randrange(len(schedule.rounds[i]))
    first, round_, last = schedule.rounds[:i], list(schedule.rounds[i]), schedule.rounds[i + 1 :]
    with pytest.raises(ScheduleError, match="twice|beside another copy"):
        check(replace(schedule, rounds=(*first, (*round_, round_[j]), *last)))
    del round_[j]
    with pytest.raises(ScheduleError):
        check(replace(schedule, rounds=(*first, tuple(round_), *last)))


@given(CATALOGUED, RANDOMS)
@examples(100)
def test_relabelled_schedules_still_check(schedule, rng):
    ranks = rng.sample(range(schedule.size), schedule.size)
    relabelled = replace(schedule, rounds=on_ranks(schedule.rounds, ranks))
    if schedule.result == "scattered":
        if ranks != list(range(schedule.size)):
            assert not accepted(relabelled)  # the chunks would have to move along
        return
    before, after = check(schedule), check(relabelled)
    assert after.determinism == before.determinism
    assert (after.rounds, after.messages, after.fan_in) == (before.rounds, before.messages, before.fan_in)


def ahead(name, size, base, ways):
    """Every rank sends all that it holds 1, `base`, .. ahead, or both ways."""
    distances = [base**step for step in range(7) if base**step < size]
    rounds = tuple(
        tuple(Transfer(r, (r + way * d) % size) for r in range(size) for way in ways) for d in distances
    )
    return Schedule(name, size, 1, rounds)


@pytest.mark.parametrize(
    ("name", "base", "ways", "most"),
    [("dissemination", 2, (1,), 33), ("trivance", 3, (1, -1), 81)],  # the latter: arXiv 2602.17254
)
def test_what_sends_all_it_holds_counts_twice_unless_on_a_power(name, base, ways, most):
    powers = {base**power: power for power in range(7)}
    for size in range(1, most + 1):
        if size in powers:
            assert check(ahead(name, size, base, ways)).rounds == powers[size]
        else:
            with pytest.raises(ScheduleError, match=rf"{name} on \d+ ranks: round \d: transfer .* twice"):
                check(ahead(name, size, base, ways))


# What the messages say


def copies(src, *ranks, chunks=range(1)):
    return tuple(Transfer(src, rank, chunks, False) for rank in ranks)


UP = tuple(Transfer(r, 0, range(2)) for r in (1, 2))
LATE = Transfer(3, 0, range(1, 2))
COPY, OTHER, MERGE = *copies(0, 1), *copies(2, 1), Transfer(3, 1)
BESIDE = "round 1: transfer 0=>1 of chunks 0:1 overwrites chunk 0 of rank 1 beside {} into it ({})"
HALVES = (*copies(0, 1), *copies(0, 1, chunks=range(1, 2)))

# Rounds, how they differ from 4 ranks with one chunk and a replicated result, and what is said of them.
MESSAGES = {
    # Right on 4 ranks; OR-ing booleans would see nothing.
    "a double count": (ahead("", 6, 2, (1,)).rounds, {"size": 6}, "planted on 6 ranks: round 3: transfer "
        "0->4 of chunks 0:1 counts ranks 3, 4 twice in chunk 0 of rank 4"),
    "a double count in a merge of many names the later transfer": (
        ((Transfer(1, 0), Transfer(2, 1)), (Transfer(0, 3), Transfer(1, 3))), {},
        "round 2: transfer 1->3 of chunks 0:1 counts rank 1 twice in chunk 0 of rank 3"),
    "a rank that lacks in all chunks": ((UP, copies(0, 1, 2, 3, chunks=range(2))), {"chunks": 2},
        "planted on 4 ranks: after the last round rank 0 lacks rank 3 in chunks 0 to 1"),
    "a rank that lacks in one": (((*UP, LATE), copies(0, 1, 2, 3, chunks=range(2))), {"chunks": 2},
        "rank 0 lacks rank 3 in chunk 0"),
    "many that lack": ((), {"size": 20}, "rank 0 lacks ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more in chunk 0"),
    "eight that lack": ((), {"size": 9}, "rank 0 lacks ranks 1, 2, 3, 4, 5, 6, 7, 8 in chunk 0"),
    "two copies": (((COPY, OTHER),), {}, BESIDE.format("another copy", "2=>1")),
    "a copy, then a merge": (((COPY, MERGE),), {}, BESIDE.format("a merge", "3->1")),
    "a merge, then a copy": (((MERGE, COPY),), {}, BESIDE.format("a merge", "3->1")),
    "copies that overlap": (((Transfer(1, 0, range(2)),), (*copies(0, 1, chunks=range(2)), HALVES[1])),
        {"size": 2, "chunks": 2}, "overwrites chunk 1 of rank 1"),
    "what is sent with the own part again": (((Transfer(2, 1), Transfer(1, 0)), (Transfer(1, 0),)),
        {"size": 3}, "round 2: transfer 1->0 of chunks 0:1 counts rank 1 twice in chunk 0 of rank 0"),
    "no ranks": ((), {"size": 0}, "not 0 and 1"),
    "no chunks": ((), {"size": 2, "chunks": 0}, "not 2 and 0"),
    "another result": ((), {"result": "gathered"}, "'gathered' is none of"),
    "scattered in other chunks": ((), {"chunks": 2, "result": "scattered"}, "as many chunks as ranks, not 2"),
    "chunks that no memory holds": ((), {"chunks": 10**9}, "has 1000000000 chunks, the limit is 524288"),
    "a scattered result on other ranks": (on_ranks(build("head_scatter", 4).rounds, [1, 2, 3, 0]),
        {"chunks": 4, "result": "scattered"}, "after the last round rank 0 lacks"),
    **{
        problem: (((), (transfer,)), {"chunks": 2}, f"planted on 4 ranks: round 2: transfer {problem}")
        for transfer, problem in (
            (Transfer(0, 4), "0->4 of chunks 0:1 names a rank outside 0 to 3"),
            (Transfer(-1, 2), "-1->2 of chunks 0:1 names a rank outside 0 to 3"),
            (Transfer(2, 2), "2->2 of chunks 0:1 sends from rank 2 to itself"),
            (Transfer(0, 1, range(3, 3)), "0->1 moves no chunk"),
            (Transfer(0, 1, range(0, 2, 2)), "0->1 of chunks 0:2 moves no chunk, or not a contiguous range"),
            (Transfer(0, 1, range(1, 3)), "0->1 of chunks 1:3 names a chunk outside 0 to 1"),
            (Transfer(0, 1, range(-1, 1)), "0->1 of chunks -1:1 names a chunk outside 0 to 1"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("problem", MESSAGES)
def test_what_is_wrong_is_named_in_one_line(problem):
    rounds, shape, said = MESSAGES[problem]
    with refused(said, error=ScheduleError):
        check(Schedule("planted", **{"size": 4, "chunks": 1, "rounds": rounds} | shape))


# Classes, depth and orders of folds


def different_brackets():
    """Rank 3 folds ((0+1)+2)+3 at once, the others pair up: (0+1)+(2+3)."""
    first = (*(Transfer(r, 3) for r in range(3)), Transfer(0, 1), Transfer(1, 0), Transfer(3, 2))
    second = (Transfer(2, 0), Transfer(2, 1), Transfer(0, 2))
    return Schedule("brackets", 4, 1, (first, second))


MANY = (tuple(Transfer(r, 0) for r in range(1, 4)),)


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        (build("all_gather_merge", 2), "A"),
        (build("all_gather_merge", 3), "C"),
        (build("recursive_multiplying", 16, factors=(2, 2, 2, 2)), "A"),
        (build("recursive_multiplying", 16, factors=(4, 4)), "C"),
        (ahead("trivance", 3, 3, (1, -1)), "C"),
        (ahead("trivance", 9, 3, (1, -1)), "none"),
        (different_brackets(), "none"),  # exact all the same
        # The result of three values is opaque, but there is only one such result.
        (Schedule("star", 4, 1, then(MANY, reversed_as_copies(MANY))), "A"),
        (Schedule("halves", 2, 2, ((Transfer(1, 0, range(2)),), HALVES)), "A"),
    ],
    ids=lambda given: getattr(given, "name", given),
)
def test_the_class_of_determinism(schedule, kind):
    assert check(schedule).determinism == kind


def test_depth_counts_the_longest_chain_of_merges():
    assert check(build("chain", 9)).depth == 8
    assert check(build("recursive_doubling", 8)).depth == 3
    assert check(build("k_nomial_tree", 16, radix=4)).depth == 6  # twice a fold of four
    assert check(build("all_gather_merge", 5)).depth == 4
    assert check(build("chain", 1)).depth == 0


def test_one_order_tells_ring_from_recursive_doubling():
    assert check(build("recursive_doubling", 8)).uniform_merge_order
    assert not check(build("ring", 8)).uniform_merge_order


def test_complete_values_are_told_apart_by_chunk_and_by_bracket():
    """Chunk 0 merges alike on all ranks, chunk 1 does not, until all have what rank 0 has."""
    alike, unlike = build("recursive_doubling", 4).rounds, on_chunks(different_brackets().rounds, 1)
    mixed = Schedule("mixed", 4, 2, side_by_side(alike, unlike))
    assert check(mixed).determinism == "none"
    assert not check(mixed).uniform_merge_order
    settled = check(replace(mixed, rounds=(*mixed.rounds, copies(0, 1, 2, 3, chunks=range(2)))))
    assert settled.determinism == "A"
    assert settled.uniform_merge_order, "rank 0 merges both chunks in pairs"
    from_3 = check(replace(mixed, rounds=(*mixed.rounds, copies(3, 0, 1, 2, chunks=range(2)))))
    assert not from_3.uniform_merge_order
    assert from_3.depth == 3


def test_folds_are_in_ascending_order_of_the_lowest_contributor():
    rounds = (Transfer(1, 3),), (Transfer(3, 2), Transfer(0, 2)), copies(2, 0), copies(2, 1, 3)
    folds = prove(Schedule("order", 4, 1, rounds)).folds
    assert folds[0] == {3: (Fold(range(1), (1, 3)),)}
    assert folds[1] == {2: (Fold(range(1), (0, 3, 2)),)}  # rank 3 holds 1 and 3 by then
    assert folds[2] == folds[3] == {}


def test_a_fold_ends_where_a_message_does():
    """Or an executor would have to look for its chunks in two messages."""
    halves = (Transfer(1, 0, range(2)), Transfer(1, 0, range(2, 4)), Transfer(2, 0, range(4)))
    folds = prove(Schedule("halves", 3, 4, (halves, copies(0, 1, 2, chunks=range(4))))).folds
    assert folds[0] == {0: (Fold(range(2), (0, 1, 2)), Fold(range(2, 4), (0, 1, 2)))}


def test_neighbouring_folds_in_one_order_are_one():
    """Chunks 0 and 1 meet rank 3 at rank 1, the others at rank 0, which then folds them all alike."""
    apart = (Transfer(3, 1, range(2)), Transfer(3, 0, range(2, 4)))
    rounds = apart, (Transfer(1, 0, range(4)),), (Transfer(2, 0, range(4)),)
    folds = prove(Schedule("joined", 4, 4, rounds, "root")).folds
    assert folds[1] == {0: (Fold(range(4), (0, 1)),)}


def test_who_may_run_ahead():
    """Root and nobody else has a result: its peers wait for nobody, however many records there are."""
    ahead_of_it = [
        check(to_root(build("chain", size))).min_records_for_double_buffering for size in (1, 2, 3)
    ]
    assert ahead_of_it == [1, None, None]


@given(CATALOGUED)
@examples(150)
def test_fold_orders_cover_every_merge_once_and_ascend(schedule):
    held = {(r, c): {r} for r in range(schedule.size) for c in range(schedule.chunks)}
    for round_, folds in zip(schedule.rounds, prove(schedule).folds, strict=True):
        before = dict(held)
        senders = Counter((t.dst, c, t.src) for t in round_ if t.merge for c in t.chunks)
        for dst, its_folds in folds.items():
            for chunks, sources in its_folds:
                for c in chunks:
                    lowest = [min(before[source, c]) for source in sources]
                    assert lowest == sorted(lowest)
                    senders.subtract((dst, c, source) for source in sources if source != dst)
                    assert sources.count(dst) == 1
                    held[dst, c] = set().union(*(before[source, c] for source in sources))
        assert not any(senders.values())
        for t in round_:
            for c in t.chunks if not t.merge else ():
                held[t.dst, c] = before[t.src, c]


# The pieces under the proof


@pytest.mark.slow
@given(st.integers(1, 30), RANDOMS)
@examples(100)
def test_chunk_map_is_a_list_kept_as_runs(chunks, rng):
    held, plain = ChunkMap(chunks, 0), [0] * chunks
    for _ in range(12):
        cuts = sorted(rng.sample(range(chunks + 1), rng.randint(2, min(5, chunks + 1))))
        pieces = [(a, b, rng.randrange(3)) for a, b in pairwise(cuts)]
        held.write(pieces)
        for first, end, value in pieces:
            plain[first:end] = [value] * (end - first)
        runs = held.pieces()
        assert [value for first, end, value in runs for _ in range(first, end)] == plain
        assert all(a[2] != b[2] for a, b in pairwise(runs)), "runs are as long as they can be"
        first = rng.randrange(chunks)
        end = rng.randint(first + 1, chunks)
        read = held.read(first, end)
        assert [value for a, b, value in read for _ in range(a, b)] == plain[first:end]
        assert (read[0][0], read[-1][1]) == (first, end)


def test_aligned_cuts_at_every_bound():
    left, right = [(0, 2, 7), (2, 6, 8)], [(0, 5, 1), (5, 6, 2)]
    assert list(aligned([left, right])) == [(0, 2, (7, 1)), (2, 5, (8, 1)), (5, 6, (8, 2))]


def test_expressions_are_equal_exactly_when_the_merges_are():
    known = Expressions(4)
    assert known.pair(0, 1) == known.pair(1, 0)
    assert known.pair(known.pair(0, 1), 2) != known.pair(known.pair(0, 2), 1)
    here, there = known.fold([0, 1, 2], rank=0, round_number=1), known.fold([0, 1, 2], rank=1, round_number=1)
    assert here != there, "a merge of three belongs to the rank that made it"
    assert known.ordered[here] == known.ordered[there] == known.pair(known.pair(0, 1), 2)
    assert known.ranks(known.mask[here]) == [0, 1, 2]
    assert known.depth[here] == 2
    with_three = known.pair(here, 3), known.pair(there, 3)
    assert with_three[0] != with_three[1]
    assert known.ordered[with_three[0]] == known.ordered[with_three[1]]


# Size

UNEVEN = (8,) * 300 + (7,) * 208 + (5,) * 48


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "size", "nodes"),
    sample(1, [
        *((name, 4096, None) for name in ("recursive_doubling", "reduce_scatter_gather", "binary_tree",
            "k_nomial_tree:radix=4", "logp_optimal", "bine:form=bandwidth", "all_gather_trees")),
        *((name, 4095, None) for name in ("bine", "circulant", "elimination")),
        *((name, 4096, (8,) * 512) for name in ("hierarchical", "multi_leader")),
        ("uneven_nodes", 4096, UNEVEN),
        ("head_scatter", 4096, None),
    ]),
)  # fmt: skip
def test_4096_ranks_are_checked_in_seconds(scheme, size, nodes):
    began = time.process_time()
    schedule = build(scheme, size, **({"nodes": nodes} if nodes else {}))
    assert check(schedule).determinism == "A"
    # One or two seconds here; the bound is for slow machines and catches work that grows with p * p.
    assert time.process_time() - began < 15
