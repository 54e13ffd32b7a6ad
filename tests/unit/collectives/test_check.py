"""The proof: what it accepts, what it refuses and in which words, and against a checker of a few lines."""

from collections import Counter
from dataclasses import replace

import pytest
from catalog_variants import VARIANTS, built
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawn import examples
from tests.support.refusals import refused
from tests.support.schedules import accepted, different_brackets, drawn_schedules, mutated
from treeattn.collectives import (
    FoldOrder,
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


# What it accepts


@pytest.mark.slow
@given(st.one_of(CATALOGUED, CATALOGUED, drawn_schedules(st.integers(2, 8))), st.integers(0, 3), st.data())
@examples(300)
def test_it_agrees_with_counting_whatever_is_changed(schedule, changes, data):
    for _ in range(changes):
        schedule = data.draw(mutated(schedule))
    assert accepted(schedule) == plain_check(schedule)


def ahead(name, size, base, ways):
    """Every rank sends all that it holds 1, `base`, .. ahead, or both ways."""
    distances = [base**step for step in range(7) if base**step < size]
    rounds = tuple(
        tuple(Transfer(r, (r + way * d) % size) for r in range(size) for way in ways) for d in distances
    )
    return Schedule(name, size, 1, rounds)


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


def test_complete_values_are_told_apart_by_chunk_and_by_bracket():
    """Chunk 0 merges alike on all ranks, chunk 1 does not, until all have what rank 0 has."""
    alike, unlike = build("recursive_doubling", 4).rounds, on_chunks(different_brackets().rounds, 1)
    mixed = Schedule("mixed", 4, 2, side_by_side(alike, unlike))
    assert check(mixed).determinism == "none"
    settled = check(replace(mixed, rounds=(*mixed.rounds, copies(0, 1, 2, 3, chunks=range(2)))))
    assert settled.determinism == "A"
    from_3 = check(replace(mixed, rounds=(*mixed.rounds, copies(3, 0, 1, 2, chunks=range(2)))))
    assert from_3.depth == 3


def test_folds_are_in_ascending_order_of_the_lowest_contributor():
    rounds = (Transfer(1, 3),), (Transfer(3, 2), Transfer(0, 2)), copies(2, 0), copies(2, 1, 3)
    folds = prove(Schedule("order", 4, 1, rounds)).folds
    assert folds[0] == {3: (FoldOrder(range(1), (1, 3)),)}
    assert folds[1] == {2: (FoldOrder(range(1), (0, 3, 2)),)}  # rank 3 holds 1 and 3 by then
    assert folds[2] == folds[3] == {}


def test_who_may_run_ahead():
    """Root and nobody else has a result: its peers wait for nobody, however many records there are."""
    ahead_of_it = [
        check(to_root(build("chain", size))).min_records_for_double_buffering for size in (1, 2, 3)
    ]
    assert ahead_of_it == [1, None, None]
