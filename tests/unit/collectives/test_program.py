"""Programs of all ranks in one process: any order that they allow gives what the schedule means."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.partials import partials
from tests.support.program_model import Model, Stuck, programs
from tests.support.reducer_contract import HEAD_DIM, OPERATOR, plain, promised, wanted
from tests.support.schedules import Case, cases
from treeattn.collectives import Schedule, Transfer, build, check
from treeattn.collectives.program import LANDING, OWN, Await, Copy, Fold, Publish

TWO_NODES = ((0, 1), (2, 3))


def on_nodes(scheme, nodes, records=4):
    return plain(build(scheme, sum(map(len, nodes)), nodes=nodes), 0, records)._replace(nodes=nodes)


def same_bits(case, made, **options):
    """Whether all ranks hold what they are promised, step after step."""
    size = case.schedule.size
    steps = [partials(size, case.records, HEAD_DIM, seed=case.seed + step) for step in range(5)]
    results = Model(made, OPERATOR, case.records, case.seed, **options).run(steps)
    return all(
        np.array_equal(promised(case, rank, held[rank]), of_rank)
        for held, values in zip(results, steps, strict=True)
        for rank, of_rank in enumerate(wanted(case, values))
    )


def in_some_order(case, made, orders=200, **options):
    """Whether bits differ, or ranks are stuck, in one of many orders."""
    try:
        return not all(same_bits(case._replace(seed=seed), made, **options) for seed in range(orders))
    except Stuck:
        return True


@given(cases())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_order_of_ranks_gives_what_the_schedule_means(case):
    """Over steps that use every slot again, on any nodes."""
    made = programs(case)
    assert same_bits(case, made)
    near = {rank: set(node) for node in case.nodes for rank in node}
    for rank, program in enumerate(made):
        assert program.message_peers.isdisjoint(near[rank])
        folded = {s.buffer for i in program.instructions if isinstance(i, Fold) for s in i.sources}
        assert folded <= {OWN, LANDING, *near[rank]}
        copies = [i.into for i in program.instructions if isinstance(i, Copy) and i.into.buffer == rank]
        used = [record for into in copies for record in range(into.first, into.stop)]
        assert len(used) == len(set(used))
        assert all(record < program.slots for record in used)


def test_one_set_of_slots_is_not_enough():
    """Else nothing above would need two. (Trees, rings and rails do with one.)"""
    for scheme in ("recursive_doubling", "all_gather_merge"):
        case = plain(build(scheme, 4), 4)
        assert in_some_order(case, programs(case), sets=1)


@pytest.mark.parametrize(("size", "records"), [(3, 1), (5, 2), (6, 4)])
def test_readers_are_awaited_where_a_result_may_not_depend_on_all(size, records):
    """Ranks without a record of their own would overwrite what others still read."""
    schedule = build("head_scatter", size)
    assert check(schedule).min_records_for_double_buffering == size
    case = plain(schedule, size, records)
    made = programs(case)
    bold = [
        replace(program, instructions=tuple(i for i in program.instructions if i.round)) for program in made
    ]
    assert not in_some_order(case, made, orders=20)
    assert in_some_order(case, bold)
    assert all(i.round for program in programs(plain(schedule, size, size)) for i in program.instructions)


@pytest.mark.parametrize("scheme", ["hierarchical", "split_rail"])
def test_a_round_that_does_not_wait_for_its_messages_is_seen(scheme):
    case = on_nodes(scheme, TWO_NODES)
    made = programs(case)
    assert not in_some_order(case, made, orders=20)
    careless = [
        replace(p, instructions=tuple(i for i in p.instructions if not isinstance(i, Await) or i.ranks))
        for p in made
    ]
    assert in_some_order(case, careless)


def test_what_leaves_in_one_round_is_published_once():
    """Two runs of records: who reads the first must not see the number before the second is copied."""
    gather = (Transfer(0, 1, range(1)), Transfer(0, 1, range(2, 3)), Transfer(1, 0, range(1, 2)))
    back = tuple(Transfer(t.dst, t.src, t.chunks, False) for t in gather)
    program = programs(plain(Schedule("own", 2, 3, (gather, back)), 2, 3))[0]
    kinds = [type(i) for i in program.instructions if i.round == 1]
    assert kinds == [Copy, Copy, Publish, Await, Fold]


def test_a_copy_lands_in_its_place_unless_that_leaves_in_the_round():
    swap = (Transfer(0, 1, range(1), False), Transfer(1, 0, range(1), False))
    schedule = Schedule("swap", 2, 1, (swap, *build("chain", 2).rounds))
    first, *_, last = programs(Case(schedule, ((0,), (1,)), 3, 1, 0))[1].exchanges
    assert [message.into.buffer for message in (*first[1], *last[1])] == [LANDING, OWN]
