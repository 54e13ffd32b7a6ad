"""Programs of ranks that read one another's memory, run here one instruction of one rank at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from treeattn import collectives
from treeattn.backends import cpu
from treeattn.collectives import pulls
from treeattn.collectives.check import prove
from treeattn.collectives.executors import loopback
from treeattn.collectives.pulls import LANDED, Nodes, Operation, Program
from treeattn.collectives.schedule import Schedule, Transfer

Array = np.ndarray[Any, Any]
SCHEMES = collectives.names("schedule")


class Node:
    """Ranks that run their programs in any order that the numbers allow, and the messages of several nodes.
    careless: launches do not wait for these."""

    def __init__(
        self, programs: list[Program], operator: cpu.MergeOperator, records: int, careless: bool = False
    ) -> None:
        self.programs, self._operator, self._careless = programs, operator, careless
        self._landed = [np.full((p.landing, operator.width), np.nan, np.float32) for p in programs]
        # What is posted from rank to rank, and how many posts of each rank have not met their counterpart.
        self._leaving: dict[tuple[int, int], list[Array]] = {}
        self._arriving: dict[tuple[int, int], list[Array]] = {}
        self._open = [0] * len(programs)
        self.held = [np.zeros((records, operator.width), np.float32) for _ in programs]
        self._slots = [np.full((2, p.set, operator.width), np.nan, np.float32) for p in programs]
        self._numbers = [0] * len(programs)

    def run(self, partials: Array, seed: int) -> list[list[Array]]:
        """What each rank holds after each step; partials: of each step, of each rank."""
        rng = random.Random(seed)
        results: list[list[Array]] = [[] for _ in self.programs]
        going = {rank: self._steps(rank, partials, results[rank]) for rank in range(len(self.programs))}
        stuck = 0
        while going and stuck < 10_000:
            rank = rng.choice(list(going))
            came = next(going[rank], None)
            stuck = 0 if came else stuck + 1
            if came is None:
                del going[rank]
        assert not going, f"ranks {list(going)} wait for one another"
        return [[result[step] for result in results] for step in range(len(partials))]

    def _steps(self, rank: int, partials: Array, results: list[Array]) -> Iterator[bool]:
        """True for every instruction that is done, False where one waits."""
        program = self.programs[rank]
        for step, of_ranks in enumerate(partials):
            self.held[rank][...] = of_ranks[rank]
            for exchange, part in zip((None, *program.exchanges), program.parts, strict=True):
                if exchange:
                    yield from self._exchange(rank, exchange)
                for at in part:
                    while not self._can(rank, step * program.numbers, program.instructions[at]):
                        yield False
                    self._do(rank, step, program.instructions[at])
                    yield True
            results.append(self.held[rank].copy())

    def _exchange(self, rank: int, exchange: pulls.Exchange) -> Iterator[bool]:
        """As a group of NCCL: it ends when its messages have met those of groups that peers have come to."""
        for peer, first, stop in exchange.receives:
            self._arriving.setdefault((peer, rank), []).append(self._landed[rank][first:stop])
        for peer, first, stop in exchange.sends:
            self._leaving.setdefault((rank, peer), []).append(self.held[rank][first:stop])
        self._open[rank] += len(exchange.sends) + len(exchange.receives)
        for pair in {(p, rank) for p, *_ in exchange.receives} | {(rank, p) for p, *_ in exchange.sends}:
            while self._leaving.get(pair) and self._arriving.get(pair):
                self._arriving[pair].pop(0)[...] = self._leaving[pair].pop(0)
                for end in pair:
                    self._open[end] -= 1
        yield True
        while self._open[rank] and not self._careless:
            yield False

    def _can(self, rank: int, before: int, instruction: pulls.Instruction) -> bool:
        near = (source.rank for source in instruction.sources if source.rank != LANDED)
        others = (other for other in near if other != rank)
        return all(self._numbers[other] >= before + instruction.round for other in others)

    def _do(self, rank: int, step: int, instruction: pulls.Instruction) -> None:
        operation, round_, first, stop, place, sources = instruction
        slots = [held[step % 2] for held in self._slots]
        if operation is Operation.COPY:
            slots[rank][place : place + stop - first] = self.held[rank][first:stop]
        elif operation is Operation.ANNOUNCE:
            self._numbers[rank] = step * self.programs[rank].numbers + round_
        elif operation is Operation.PULL:
            places = {rank: self.held[rank], LANDED: self._landed[rank]}
            where = (places.get(s.rank, slots[s.rank]) for s in sources)
            values = [
                array[s.place : s.place + stop - first] for array, s in zip(where, sources, strict=True)
            ]
            total = values[0].copy()
            for value in values[1:]:
                self._operator.planned_merge(total, value.copy())()
            self.held[rank][first:stop] = total


def programs_of(
    schedule: Schedule, records: int, group: int = 1, nodes: Nodes | None = None
) -> list[Program]:
    proof = prove(schedule)
    return [pulls.plan(schedule, proof, rank, records, group, nodes) for rank in range(schedule.size)]


@pytest.mark.parametrize("records", [2, 7])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_programs_give_what_the_schedule_means(scheme: str, size: int, records: int) -> None:
    """In any order of the ranks, over steps that use every slot again."""
    schedule, operator = collectives.build(scheme, size), cpu.MergeOperator(4)
    partials = np.random.default_rng(size).standard_normal((5, size, records, 6)).astype(np.float32)
    held = Node(programs_of(schedule, records), operator, records).run(partials, seed=size)
    for got, step in zip(held, partials, strict=True):
        want = loopback.run(schedule, list(step), operator)
        for rank in range(size):
            own = range(rank, rank + 1) if schedule.result == "scattered" else range(schedule.chunks)
            part = got[rank][schedule.chunk_slice(own, records)]
            np.testing.assert_array_equal(part.view(np.uint32), want[rank].view(np.uint32))


NODES: list[Nodes] = [((0, 1), (2, 3)), ((0, 2, 4), (1, 3, 5)), ((0,), (1, 2, 3, 4), (5, 6))]


@pytest.mark.parametrize("records", [2, 7])
@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_programs_over_several_nodes(scheme: str, nodes: Nodes, records: int) -> None:
    """The same, where other nodes are reached by messages alone."""
    size = sum(map(len, nodes))
    given = {"nodes": nodes} if collectives.needs_nodes(scheme) else {}
    schedule, operator = collectives.build(scheme, size, **given), cpu.MergeOperator(4)
    partials = np.random.default_rng(size).standard_normal((5, size, records, 6)).astype(np.float32)
    programs = programs_of(schedule, records, nodes=nodes)
    near = {rank: node for node in nodes for rank in node}
    for rank, program in enumerate(programs):
        pulled = {source.rank for i in program.instructions for source in i.sources}
        assert pulled <= {LANDED, *near[rank]}
        far = {message.peer for e in program.exchanges for message in (*e.sends, *e.receives)}
        assert far.isdisjoint(near[rank])
    held = Node(programs, operator, records).run(partials, seed=size)
    for got, step in zip(held, partials, strict=True):
        want = loopback.run(schedule, list(step), operator)
        for rank in range(size):
            own = range(rank, rank + 1) if schedule.result == "scattered" else range(schedule.chunks)
            part = got[rank][schedule.chunk_slice(own, records)]
            np.testing.assert_array_equal(part.view(np.uint32), want[rank].view(np.uint32))


@pytest.mark.parametrize("scheme", ["hierarchical", "split_rail"])
def test_schemes_for_nodes_send_once_to_each_other_node(scheme: str) -> None:
    """Two parts: what is done within the node, and what follows the one exchange."""
    nodes = ((0, 1, 2), (3, 4, 5))
    programs = programs_of(collectives.build(scheme, 6, nodes=nodes), 6, nodes=nodes)
    parts = [len(program.parts) for program in programs]
    assert parts == ([2, 1, 1, 2, 1, 1] if scheme == "hierarchical" else [2] * 6)


def test_a_launch_that_does_not_wait_for_messages_is_seen() -> None:
    schedule, operator = collectives.build("split_rail", 4, nodes=NODES[0]), cpu.MergeOperator(4)
    partials = np.random.default_rng(0).standard_normal((3, 4, 4, 6)).astype(np.float32)
    want = [loopback.run(schedule, list(step), operator) for step in partials]

    def wrong(careless: bool, seed: int) -> bool:
        programs = programs_of(schedule, 4, nodes=NODES[0])
        held = Node(programs, operator, 4, careless).run(partials, seed)
        return any((held[s][rank] != want[s][rank]).any() for s in range(3) for rank in range(4))

    assert any(wrong(True, seed) for seed in range(20))
    assert not any(wrong(False, seed) for seed in range(20))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_slots_of_a_step_do_not_overlap(scheme: str) -> None:
    for program in programs_of(collectives.build(scheme, 6), 12):
        copies = [i for i in program.instructions if i.operation is Operation.COPY]
        used = [slot for i in copies for slot in range(i.place, i.place + i.stop - i.first)]
        assert len(used) == len(set(used))
        assert all(slot < program.set for slot in used)


@pytest.mark.parametrize(("records", "awaits"), [(5, True), (6, False)])
def test_readers_are_awaited_where_a_result_may_count_nobody(records: int, awaits: bool) -> None:
    for program in programs_of(collectives.build("head_scatter", 6), records):
        operations = {instruction.operation for instruction in program.instructions}
        assert (Operation.AWAIT in operations) == awaits


def test_a_rank_whose_result_counts_nobody_would_run_ahead() -> None:
    """Without waiting for its readers it writes what they have not read."""
    schedule, operator = collectives.build("head_scatter", 3), cpu.MergeOperator(4)
    bold = [
        p._replace(instructions=tuple(i for i in p.instructions if i.operation is not Operation.AWAIT))
        for p in programs_of(schedule, 2)
    ]
    partials = np.random.default_rng(0).standard_normal((5, 3, 2, 6)).astype(np.float32)

    def wrong(programs: list[Program], seed: int) -> bool:
        held = Node(programs, operator, 2).run(partials, seed)
        want = [loopback.run(schedule, list(step), operator) for step in partials]
        return any((held[s][rank][rank - 1] != want[s][rank][0]).any() for s in range(5) for rank in (1, 2))

    assert any(wrong(bold, seed) for seed in range(20))
    assert not any(wrong(programs_of(schedule, 2), seed) for seed in range(20))


def test_one_set_of_slots_would_not_do() -> None:
    schedule, operator = collectives.build("recursive_doubling", 4), cpu.MergeOperator(4)
    partials = np.random.default_rng(0).standard_normal((6, 4, 1, 6)).astype(np.float32)
    want = [loopback.run(schedule, list(step), operator) for step in partials]

    def wrong(sets: int, seed: int) -> bool:
        node = Node(programs_of(schedule, 1), operator, 1)
        if sets == 1:
            node._slots = [np.broadcast_to(held[:1], held.shape) for held in node._slots]
            for held in node._slots:
                held.flags.writeable = True
        held = node.run(partials, seed)
        return any((held[s][rank] != want[s][rank]).any() for s in range(6) for rank in range(4))

    assert any(wrong(1, seed) for seed in range(200))
    assert not any(wrong(2, seed) for seed in range(200))


def test_what_leaves_in_one_round_is_announced_once() -> None:
    """Two runs of records: who pulls the first must not see the number before the second is copied."""
    rounds = (
        (Transfer(0, 1, range(1)), Transfer(0, 1, range(2, 3)), Transfer(1, 0, range(1, 2))),
        (
            Transfer(1, 0, range(1), False),
            Transfer(1, 0, range(2, 3), False),
            Transfer(0, 1, range(1, 2), False),
        ),
    )
    program = programs_of(Schedule("own", 2, 3, rounds), 3)[0]
    operations = [instruction.operation for instruction in program.instructions if instruction.round == 1]
    assert operations == [Operation.COPY, Operation.COPY, Operation.ANNOUNCE, Operation.PULL]
