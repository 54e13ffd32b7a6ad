"""The proof: what it accepts, what it refuses and in which words, and against a checker of a few lines."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from catalog_variants import STUDIED, VARIANTS, at_size, label
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.drawn import examples, sample
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
from treeattn.errors import RestrictionError, ScheduleError


def plain_check(schedule):
    """Exactly once, with counters per (rank, chunk) and no other idea: the oracle of this file."""
    held = {(r, c): Counter([r]) for r in range(schedule.size) for c in range(schedule.chunks)}
    gathered = {key: Counter() for key in held}
    for round_ in schedule.rounds:
        before, apart = dict(held), dict(gathered)
        writes = Counter((t.dst, c) for t in round_ for c in t.chunks)
        for t in round_:
            if t.src == t.dst or not t.chunks or not (t.merge or t.inclusive):
                return False
            for c in t.chunks:
                sent = (before if t.inclusive else apart)[t.src, c]
                if not sent or (not t.merge and writes[t.dst, c] > 1):
                    return False
                held[t.dst, c] = held[t.dst, c] + sent if t.merge else sent
                gathered[t.dst, c] = gathered[t.dst, c] + sent if t.merge else Counter()
                if max(held[t.dst, c].values()) > 1:
                    return False
    promised = ((r, c) for r in range(schedule.size) for c in schedule.promised(r))
    return all(len(held[key]) == schedule.size for key in promised)


def accepted(schedule):
    try:
        check(schedule)
    except ScheduleError:
        return False
    return True


@st.composite
def built(draw, low=2, high=12):
    """A schedule of the catalogue with at least one transfer."""
    name, params = draw(st.sampled_from([*VARIANTS, *((name, {}) for name in STUDIED)]))
    size = draw(st.integers(low, high))
    try:
        return build(name, size, **at_size(params, size))
    except RestrictionError:
        return build(name, size)


def places(schedule):
    return [(i, j) for i, round_ in enumerate(schedule.rounds) for j in range(len(round_))]


def with_round(schedule, index, round_):
    rounds = [*schedule.rounds[:index], tuple(round_), *schedule.rounds[index + 1 :]]
    return replace(schedule, rounds=tuple(rounds))


# Planted faults


@given(built(), st.randoms(use_true_random=False))
@examples(200)
def test_a_dropped_transfer_is_caught(schedule, rng):
    i, j = rng.choice(places(schedule))
    round_ = list(schedule.rounds[i])
    del round_[j]
    with pytest.raises(ScheduleError):
        check(with_round(schedule, i, round_))


@given(built(), st.randoms(use_true_random=False))
@examples(200)
def test_a_doubled_transfer_is_caught(schedule, rng):
    i, j = rng.choice(places(schedule))
    round_ = schedule.rounds[i]
    with pytest.raises(ScheduleError, match="twice|beside another copy"):
        check(with_round(schedule, i, [*round_, round_[j]]))


@pytest.mark.parametrize("name", ["chain", "binary_tree", "k_nomial_tree", "ring", "head_scatter"])
@pytest.mark.parametrize("size", [5, 8])
def test_swapped_rounds_are_caught(name, size):
    schedule = build(name, size)
    first, *middle, last = schedule.rounds
    with pytest.raises(ScheduleError, match="lacks|twice"):
        check(replace(schedule, rounds=(last, *middle, first)))


def mutated(schedule, rng):
    """One random change that may or may not break the schedule."""
    i, j = rng.choice(places(schedule))
    round_ = list(schedule.rounds[i])
    transfer = round_[j]
    kind = rng.randrange(6)
    if kind == 5:
        round_[j] = transfer._replace(inclusive=not transfer.inclusive)
    elif kind == 0:
        round_[j] = transfer._replace(src=rng.randrange(schedule.size))
    elif kind == 1:
        round_[j] = transfer._replace(merge=not transfer.merge)
    elif kind == 2:
        first = rng.randrange(schedule.chunks)
        round_[j] = transfer._replace(chunks=range(first, rng.randint(first + 1, schedule.chunks)))
    elif kind == 3:
        rounds = list(schedule.rounds)
        k = rng.randrange(len(rounds))
        rounds[i], rounds[k] = rounds[k], rounds[i]
        return replace(schedule, rounds=tuple(rounds))
    else:
        round_[j] = transfer._replace(src=transfer.dst, dst=transfer.src)
    return with_round(schedule, i, round_)


@pytest.mark.slow
@given(built(), st.randoms(use_true_random=False), st.integers(0, 3))
@examples(600)
def test_agrees_with_counting_on_random_changes(schedule, rng, changes):
    for _ in range(changes):
        schedule = mutated(schedule, rng)
    assert accepted(schedule) == plain_check(schedule)


@given(built(), st.randoms(use_true_random=False))
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


# What the messages say


def failure(*rounds, size=4, chunks=1, result="replicated", name="planted"):
    with pytest.raises(ScheduleError) as caught:
        check(Schedule(name, size, chunks, rounds, result))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_double_count_names_round_transfer_and_ranks():
    # Dissemination is right on 4 ranks and counts twice on 6, where OR-ing booleans sees nothing.
    rounds = tuple(tuple(Transfer(r, (r + d) % 6) for r in range(6)) for d in (1, 2, 4))
    assert failure(*rounds, size=6) == (
        "planted on 6 ranks: round 3: transfer 0->4 of chunks 0:1 "
        "counts ranks 3, 4 twice in chunk 0 of rank 4"
    )


def dissemination(size):
    """Every rank sends all that it holds 1, 2, 4, .. ahead: right where p is a power of two."""
    distances = [1 << bit for bit in range((size - 1).bit_length())]
    rounds = tuple(tuple(Transfer(r, (r + d) % size) for r in range(size)) for d in distances)
    return Schedule("dissemination", size, 1, rounds)


@pytest.mark.parametrize("size", range(1, 34))
def test_dissemination_counts_twice_unless_on_a_power_of_two(size):
    if size & (size - 1) == 0:
        assert check(dissemination(size)).rounds == size.bit_length() - 1
        return
    with pytest.raises(ScheduleError, match=r"dissemination on \d+ ranks: round \d: transfer .* twice"):
        check(dissemination(size))


def trivance(size):
    """Whole records 1, 3, 9, .. ahead and behind (arXiv 2602.17254, the latency-optimal form)."""
    distances = [3**step for step in range(7) if 3**step < size]
    rounds = tuple(
        tuple(Transfer(r, (r + way * d) % size) for r in range(size) for way in (1, -1)) for d in distances
    )
    return Schedule("trivance", size, 1, rounds)


@pytest.mark.parametrize("size", range(1, 82))
def test_whole_records_both_ways_count_twice_unless_on_a_power_of_three(size):
    if size in (1, 3, 9, 27, 81):
        assert check(trivance(size)).determinism == ("none" if size > 3 else "C" if size == 3 else "A")
        return
    with pytest.raises(ScheduleError, match=r"trivance on \d+ ranks: round \d: transfer .* twice"):
        check(trivance(size))


def test_double_count_in_a_merge_of_many_names_the_later_transfer():
    rounds = ((Transfer(1, 0), Transfer(2, 1)), (Transfer(0, 3), Transfer(1, 3)))
    assert "round 2: transfer 1->3 of chunks 0:1 counts rank 1 twice in chunk 0 of rank 3" in failure(*rounds)


def test_missing_contributions_name_rank_and_chunks():
    up = tuple(Transfer(r, 0, range(2)) for r in (1, 2))
    down = tuple(Transfer(0, r, range(2), False) for r in (1, 2, 3))
    assert failure(up, down, chunks=2) == (
        "planted on 4 ranks: after the last round rank 0 lacks rank 3 in chunks 0 to 1"
    )
    late = Transfer(3, 0, range(1, 2))
    assert "rank 0 lacks rank 3 in chunk 0" in failure((*up, late), down, chunks=2)
    many = failure(size=20)
    assert "rank 0 lacks ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more in chunk 0" in many


def test_conflicting_writes_are_named():
    copy, other, merge = Transfer(0, 1, range(1), False), Transfer(2, 1, range(1), False), Transfer(3, 1)
    expected = "round 1: transfer 0=>1 of chunks 0:1 overwrites chunk 0 of rank 1 beside {} into it ({})"
    assert expected.format("another copy", "2=>1") in failure((copy, other))
    assert expected.format("a merge", "3->1") in failure((copy, merge))
    assert expected.format("a merge", "3->1") in failure((merge, copy))


def test_writes_to_different_chunks_do_not_conflict():
    up = (Transfer(1, 0, range(2)),)
    halves = (Transfer(0, 1, range(1), False), Transfer(0, 1, range(1, 2), False))
    assert check(Schedule("halves", 2, 2, (up, halves))).determinism == "A"
    overlap = (Transfer(0, 1, range(2), False), Transfer(0, 1, range(1, 2), False))
    assert "overwrites chunk 1 of rank 1" in failure(up, overlap, size=2, chunks=2)


@pytest.mark.parametrize(
    ("transfer", "problem"),
    [
        (Transfer(0, 4), "transfer 0->4 of chunks 0:1 names a rank outside 0 to 3"),
        (Transfer(-1, 2), "transfer -1->2 of chunks 0:1 names a rank outside 0 to 3"),
        (Transfer(2, 2), "transfer 2->2 of chunks 0:1 sends from rank 2 to itself"),
        (Transfer(0, 1, range(3, 3)), "transfer 0->1 moves no chunk"),
        (Transfer(0, 1, range(0, 2, 2)), "moves no chunk, or not a contiguous range"),
        (Transfer(0, 1, range(1, 3)), "transfer 0->1 of chunks 1:3 names a chunk outside 0 to 1"),
        (Transfer(0, 1, range(-1, 1)), "names a chunk outside 0 to 1"),
    ],
)
def test_impossible_transfers_are_named(transfer, problem):
    text = failure((), (transfer,), chunks=2)
    assert text.startswith("planted on 4 ranks: round 2: transfer ")
    assert problem in text


def test_what_is_gathered_leaves_out_the_own_part():
    """Rank 1 passes on what rank 2 gave it, and then rank 0 counts 1 once."""
    first = (Transfer(2, 1), Transfer(1, 0))
    rest = Transfer(1, 0, inclusive=False)
    down = tuple(Transfer(0, r, range(1), False) for r in (1, 2))
    assert check(Schedule("rest", 3, 1, (first, (rest,), down))).determinism == "A"
    twice = "round 2: transfer 1->0 of chunks 0:1 counts rank 1 twice in chunk 0 of rank 0"
    assert twice in failure(first, (rest._replace(inclusive=True),), down, size=3)


def test_nothing_gathered_cannot_be_sent():
    early = (Transfer(1, 0, inclusive=False),)
    text = "round 1: transfer 1'->0 of chunks 0:1 sends what rank 1 has gathered, which is nothing yet"
    assert text in failure(early, size=2)
    copied = (Transfer(0, 1, range(1), False),)
    assert "round 3: transfer 1'->2 of chunks 0:1 sends what rank 1 has gathered" in failure(
        (Transfer(2, 1),), copied, (Transfer(1, 2, inclusive=False),), size=3
    )
    assert "overwrites with less than its sender holds" in failure(
        (Transfer(2, 1),), (Transfer(1, 0, range(1), False, False),), size=3
    )


def test_wrong_shapes_are_refused():
    assert "not 0 and 1" in failure(size=0)
    assert "not 2 and 0" in failure(size=2, chunks=0)
    assert "'gathered' is none of" in failure(result="gathered")
    assert "as many chunks as ranks, not 2" in failure(chunks=2, result="scattered")


def test_chunks_that_no_memory_holds_are_refused():
    whole = range(10**9)
    rounds = ((Transfer(1, 0, whole),), (Transfer(0, 1, whole, False),))
    with pytest.raises(ScheduleError, match="has 1000000000 chunks, the limit is 524288"):
        check(Schedule("huge", 2, 10**9, rounds))


def test_a_scattered_result_must_lie_on_its_rank():
    turned = on_ranks(build("head_scatter", 4).rounds, [1, 2, 3, 0])
    assert "after the last round rank 0 lacks" in failure(*turned, chunks=4, result="scattered")


# Classes, depth and orders of folds


def test_class_a_for_pairs_and_class_c_for_all_to_all():
    assert check(build("all_gather_merge", 2)).determinism == "A"
    assert check(build("all_gather_merge", 3)).determinism == "C"
    assert check(build("recursive_multiplying", 16, factors=(2, 2, 2, 2))).determinism == "A"
    assert check(build("recursive_multiplying", 16, factors=(4, 4))).determinism == "C"


def different_brackets():
    """Rank 3 folds ((0+1)+2)+3 at once, the others pair up: (0+1)+(2+3)."""
    first = (*(Transfer(r, 3) for r in range(3)), Transfer(0, 1), Transfer(1, 0), Transfer(3, 2))
    second = (Transfer(2, 0), Transfer(2, 1), Transfer(0, 2))
    return Schedule("brackets", 4, 1, (first, second))


def test_different_brackets_are_exact_but_have_no_class():
    assert check(different_brackets()).determinism == "none"


def test_a_merge_of_many_copied_down_is_class_a():
    # The result of three values is opaque, but there is only one such result.
    up = tuple(Transfer(r, 0) for r in range(1, 4))
    star = Schedule("star", 4, 1, then((up,), reversed_as_copies((up,))))
    assert check(star).determinism == "A"


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
    down = tuple(Transfer(0, rank, range(2), False) for rank in (1, 2, 3))
    settled = check(replace(mixed, rounds=(*mixed.rounds, down)))
    assert settled.determinism == "A"
    assert settled.uniform_merge_order, "rank 0 merges both chunks in pairs"
    from_3 = tuple(Transfer(3, rank, range(2), False) for rank in (0, 1, 2))
    assert not check(replace(mixed, rounds=(*mixed.rounds, from_3))).uniform_merge_order
    assert check(replace(mixed, rounds=(*mixed.rounds, from_3))).depth == 3


def test_folds_are_in_ascending_order_of_the_lowest_contributor():
    rounds = ((Transfer(1, 3),), (Transfer(3, 2), Transfer(0, 2)))
    schedule = Schedule("order", 4, 1, then(rounds, ((Transfer(2, 0, range(1), False),),)))
    finished = replace(
        schedule, rounds=(*schedule.rounds, tuple(Transfer(2, r, range(1), False) for r in (1, 3)))
    )
    folds = prove(finished).folds
    assert folds[0] == {3: (Fold(range(1), (1, 3)),)}
    assert folds[1] == {2: (Fold(range(1), (0, 3, 2)),)}  # rank 3 holds 1 and 3 by then
    assert folds[2] == folds[3] == {}


def test_a_fold_ends_where_a_message_does():
    """Or an executor would have to look for its chunks in two messages."""
    halves = (Transfer(1, 0, range(2)), Transfer(1, 0, range(2, 4)), Transfer(2, 0, range(4)))
    down = tuple(Transfer(0, r, range(4), False) for r in (1, 2))
    folds = prove(Schedule("halves", 3, 4, (halves, down))).folds
    assert folds[0] == {0: (Fold(range(2), (0, 1, 2)), Fold(range(2, 4), (0, 1, 2)))}


def test_neighbouring_folds_in_one_order_are_one():
    """Chunks 0 and 1 meet rank 3 at rank 1, the others at rank 0, which then folds them all alike."""
    apart = (Transfer(3, 1, range(2)), Transfer(3, 0, range(2, 4)))
    rounds = apart, (Transfer(1, 0, range(4)),), (Transfer(2, 0, range(4)),)
    folds = prove(Schedule("joined", 4, 4, rounds, "root")).folds
    assert folds[1] == {0: (Fold(range(4), (0, 1)),)}


def test_who_may_run_ahead():
    """Root and nobody else has a result: its peers wait for nobody, however many records there are."""
    ahead = [check(to_root(build("chain", size))).min_records_for_double_buffering for size in (1, 2, 3)]
    assert ahead == [1, None, None]


@given(built(high=14))
@examples(150)
def test_fold_orders_cover_every_merge_once_and_ascend(schedule):
    assume(not schedule.has_exclusive)  # such a rank folds twice, once without its own
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
@given(st.integers(1, 30), st.randoms(use_true_random=False))
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "size", "nodes"),
    sample(
        1,
        [
            ("recursive_doubling", 4096, None),
            ("reduce_scatter_gather", 4096, None),
            ("binary_tree", 4096, None),
            ("k_nomial_tree:radix=4", 4096, None),
            ("logp_optimal", 4096, None),
            ("bine", 4095, None),
            ("bine:form=bandwidth", 4096, None),
            ("circulant", 4095, None),
            ("elimination", 4095, None),
            ("all_gather_trees", 4096, None),
            ("hierarchical", 4096, (8,) * 512),
            ("multi_leader", 4096, (8,) * 512),
            ("uneven_nodes", 4096, (8,) * 300 + (7,) * 208 + (5,) * 48),
            ("head_scatter", 4096, None),
        ],
    ),
)
def test_4096_ranks_are_checked_in_seconds(scheme, size, nodes):
    began = time.process_time()
    schedule = build(scheme, size, **({"nodes": nodes} if nodes else {}))
    assert check(schedule).determinism == "A"
    # One or two seconds here; the bound is for slow machines and catches work that grows with p * p.
    assert time.process_time() - began < 15


def test_random_schedules_of_merges_agree_with_counting():
    """Small schedules from nothing, most of them wrong."""
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
                    Transfer(*pair, range(start, end), rng.random() < 0.6, rng.random() < 0.9)
                    for pair, start, end in zip(pairs, starts, ends, strict=True)
                )
            )
        schedule = Schedule("random", size, chunks, tuple(rounds))
        assert accepted(schedule) == plain_check(schedule), schedule
        verdicts[accepted(schedule)] += 1
    assert min(verdicts[True], verdicts[False]) > 20


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_counting_accepts_what_the_check_accepts(variant):
    name, params = variant
    for size in (1, 2, 3, 7, 12, 16):
        try:
            schedule = build(name, size, **at_size(params, size))
        except RestrictionError:
            continue
        assert accepted(schedule)
        assert plain_check(schedule)
