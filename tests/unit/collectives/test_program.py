"""Programs of all ranks in one process: any order that they allow gives what the schedule means."""

import random
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from tests.support.drawn import examples
from tests.support.partials import partials
from tests.support.reducer_contract import HEAD_DIM, OPERATOR, plain, promised, wanted
from tests.support.schedules import Case, cases
from treeattn.collectives import Schedule, Transfer, build, check, prove
from treeattn.collectives import program as ir
from treeattn.collectives.program import LANDING, OWN, Await, Copy, Fold, Publish, Recv, Send


class Stuck(AssertionError):
    """Ranks wait for one another."""


def programs(case, pieces=1):
    """Of every rank of a `schedules.Case`."""
    proof, node = prove(case.schedule), {rank: node for node in case.nodes for rank in node}
    cut = {"granularity": case.granularity, "pieces": pieces}
    return [
        ir.plan(case.schedule, proof, rank, case.records, node=node[rank], **cut)
        for rank in range(case.schedule.size)
    ]


class Model:
    """Ranks and their buffers; `sets` of slots, of which steps use one after the other.

    Ranks go on one instruction at a time. A message moves at any time between its start at both ends and the
    first of the two waits for it; what a rank publishes of a piece is a number that only grows. So what may
    be overwritten too early is, in some order.
    """

    def __init__(self, programs, operator, records, seed=0, sets=2):
        self._programs, self._operator, self._sets = programs, operator, sets
        self._random = random.Random(seed)
        self.held = [np.zeros((records, operator.width), operator.dtype) for _ in programs]
        garbage = np.nan if operator.dtype.kind == "f" else 1 << 60
        self._landed = [np.full((p.landing, operator.width), garbage, operator.dtype) for p in programs]
        slots = [np.full((sets, p.slots, operator.width), garbage, operator.dtype) for p in programs]
        self._slots, self._published = slots, defaultdict(lambda: -1)
        self._posted = {}  # (src, dst) -> arrays to receive, and to send, that have not met
        self._ready = []  # those that have, and not moved
        self._open = [0] * len(programs)  # messages of each rank that have not moved

    def run(self, values):
        """What each rank holds after each step; values: of each step, of each rank."""
        results = [[] for _ in self._programs]
        going = {rank: self._steps(rank, values, results[rank]) for rank in range(len(self._programs))}
        idle = 0
        while going:
            if self._ready and self._random.random() < 0.3:
                self._move()
            rank = self._random.choice(list(going))
            came = next(going[rank], None)
            idle = 0 if came else idle + 1
            if came is None:
                del going[rank]
            elif idle > 50 * len(going):
                if not self._ready:
                    raise Stuck(f"ranks {list(going)} wait for one another")
                self._move()
        return [[result[step] for result in results] for step in range(len(values))]

    def _steps(self, rank, values, results):
        """True for every instruction that is done, False where one waits."""
        program = self._programs[rank]
        for step, of_ranks in enumerate(values):
            self.held[rank][...] = of_ranks[rank]
            for instruction in program.instructions:
                while not self._can(rank, step, instruction):
                    yield False
                self._do(rank, step, instruction)
                yield True
            results.append(self.held[rank].copy())

    def _number(self, rank, step, round_):
        return step * (self._programs[rank].rounds + 1) + round_

    def _can(self, rank, step, instruction):
        if not isinstance(instruction, Await):
            return True
        wanted = self._number(rank, step - instruction.steps_ago, instruction.round)
        published = (self._published[other, instruction.piece] for other in instruction.ranks)
        return not self._open[rank] and all(number >= wanted for number in published)

    def _do(self, rank, step, i):
        if isinstance(i, Send | Recv):
            sends, pair = isinstance(i, Send), (rank, i.peer) if isinstance(i, Send) else (i.peer, rank)
            array = self._array(rank, step, i.source if sends else i.into)
            self._open[rank] += 1
            waiting = self._posted.setdefault(pair, ([], []))
            waiting[sends].append(array)
            if all(waiting):
                self._ready.append((*pair, waiting[0].pop(0), waiting[1].pop(0)))
        elif isinstance(i, Publish):
            self._published[rank, i.piece] = self._number(rank, step, i.round)
        elif isinstance(i, Copy):
            self._array(rank, step, i.into, writes=True)[...] = self._array(rank, step, i.source)
        elif isinstance(i, Fold):
            total, *others = (self._array(rank, step, source) for source in i.sources)
            total = total.copy()
            for other in others:
                self._operator.planned_merge(total, other.copy())()
            self._array(rank, step, i.into, writes=True)[...] = total

    def _array(self, rank, step, region, writes=False):
        buffer = region.buffer
        assert not writes or buffer in (rank, OWN, LANDING), "a rank writes to what is its own alone"
        whole = {OWN: self.held[rank], LANDING: self._landed[rank]}.get(buffer)
        if whole is None:
            whole = self._slots[buffer][step % self._sets]
        assert 0 <= region.first < region.stop <= len(whole)
        return whole[region.first : region.stop]

    def _move(self):
        """Let one of the messages that both ends have started arrive."""
        src, dst, into, source = self._ready.pop(self._random.randrange(len(self._ready)))
        assert into.shape == source.shape, f"{src} sends {source.shape}, {dst} takes {into.shape}"
        into[...] = source
        self._open[src] -= 1
        self._open[dst] -= 1


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
@examples(75)
def test_any_order_of_ranks_gives_what_the_schedule_means(case):
    """Over steps that use every slot again, on any nodes, in one piece or in several."""
    made = programs(case, pieces=1 + case.seed % 3)
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


def test_a_piece_is_folded_and_passed_on_before_the_next_is_awaited():
    case = plain(build("binary_tree", 2), 2, 5)
    root, leaf = ([(type(i), i.round) for i in program.instructions] for program in programs(case, pieces=2))
    assert root == [(Await, 1), (Fold, 1), (Copy, 2), (Publish, 2)] * 2
    assert leaf == [(Copy, 1), (Publish, 1)] * 2 + [(Await, 2), (Copy, 2)] * 2
    folds = [i.into for i in programs(case, pieces=2)[0].instructions if isinstance(i, Fold)]
    assert [(into.first, into.stop) for into in folds] == [(0, 2), (2, 5)]
    swap = plain(build("recursive_doubling", 2), 2, 5)
    assert programs(swap, pieces=2) == programs(swap)


@pytest.mark.parametrize("careful", [True, False])
def test_each_piece_has_a_flag_of_its_own(careful):
    case = plain(build("binary_tree", 4), 4)
    made = programs(case, pieces=3)
    if not careful:
        made = [
            replace(
                program,
                instructions=tuple(
                    i._replace(piece=0) if isinstance(i, Await) else i for i in program.instructions
                ),
            )
            for program in made
        ]
    assert in_some_order(case, made, orders=40 if careful else 200) != careful


def test_a_copy_lands_in_its_place_unless_that_leaves_in_the_round():
    swap = (Transfer(0, 1, range(1), False), Transfer(1, 0, range(1), False))
    schedule = Schedule("swap", 2, 1, (swap, *build("chain", 2).rounds))
    first, *_, last = programs(Case(schedule, ((0,), (1,)), 3, 1, 0))[1].exchanges
    assert [i.into.buffer for i in (*first, *last) if isinstance(i, Recv)] == [LANDING, OWN]
