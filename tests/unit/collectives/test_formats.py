"""Collectives that others describe: read, proved, simulated; damaged ones refused."""

from __future__ import annotations

import random

import pytest

from tests.support import plans
from treeattn.collectives import Schedule, build, check, names
from treeattn.collectives.clusters import description, placement
from treeattn.collectives.clusters.simulate import Payload, simulate
from treeattn.collectives.drawings import text as draw
from treeattn.collectives.formats import goal, msccl
from treeattn.errors import ScheduleError

READ = {
    plans.msccl_ring: msccl.read,
    plans.msccl_all_pairs: msccl.read,
    plans.goal_line: goal.read,
}
MUTANTS = 200


@pytest.mark.parametrize("written", READ, ids=lambda written: written.__name__)
def test_published_algorithms_are_read_proved_and_simulated(written):
    cluster = description.load("dgx-h100")
    for size in (2, 3, 5, 8):
        schedule = READ[written](written(size))
        found = check(schedule)
        assert found.determinism == "A"
        assert found.messages == (2 * size * (size - 1) if written in [*READ][:2] else 2 * (size - 1))
        places = placement.PLACEMENTS["block"](cluster, size)
        assert simulate(schedule, cluster, places, Payload(16, 520)).time > 0
        assert schedule.name in draw.text(schedule)


def test_a_ring_is_the_ring_of_the_catalogue():
    read, ours = msccl.read(plans.msccl_ring(4)), build("ring", 4)
    assert [len(round_) for round_ in read.rounds] == [len(round_) for round_ in ours.rounds]
    assert check(read) == check(ours)


def test_goal_that_is_written_is_read_back():
    """Where all messages carry everything; the others are refused by name."""
    for name in names("schedule"):
        ours = build(name, 7)
        if ours.chunks > 1:
            with pytest.raises(ScheduleError, match="which part of the records|there already"):
                goal.read(draw.goal(ours))
        else:
            read = check(goal.read(draw.goal(ours)))
            assert (read.messages, read.determinism) == (ours.messages, check(ours).determinism)
            assert read.rounds <= len(ours.rounds)


@pytest.mark.parametrize("written", READ, ids=lambda it: it.__name__)
def test_a_damaged_one_is_refused_in_one_line_or_right_all_the_same(written):
    """A line, or a step, removed, doubled or swapped with another."""
    drawn, refused = random.Random(17), []
    for _ in range(MUTANTS):
        steps = written(drawn.randint(3, 5)).splitlines()
        at, other = (drawn.randrange(len(steps)) for _ in range(2))
        if (how := drawn.choice(("removed", "doubled", "swapped"))) == "swapped":
            steps[at], steps[other] = steps[other], steps[at]
        else:
            steps[at : at + 1] = [steps[at]] * (2 * (how == "doubled"))
        try:
            check(READ[written]("\n".join(steps)))
        except ScheduleError as error:
            refused.append(str(error))
    assert len(refused) > MUTANTS / 2
    assert not any("\n" in text for text in refused)


XML, GOAL = plans.msccl_ring, plans.goal_line


@pytest.mark.parametrize(
    ("written", "old", "new", "message"),
    [
        (XML, 'coll="allreduce"', 'coll="alltoall"', "no reduction"),
        (XML, 'type="rrs"', 'type="rcx"', "gpu 0, tb 0, step 1: type='rcx' cannot be read"),
        (XML, 'ngpus="3"', 'ngpus="4"', "the gpus are not 0 to 3"),
        (XML, 'srcbuf="i"', 'srcbuf="x"', "none of i, o, s"),
        (XML, "<algo", "<algorithm", "not XML"),
        (XML, 'recv="2"', 'recv="0"', "no other gpu"),
        (GOAL, "num_ranks", "ranks", "does not begin with num_ranks"),
        (GOAL, "64b", "32b", "32 and 64 bytes"),
        (GOAL, "recv 64b from 1", "recv 64b from 0", "no message to or from another rank"),
        (GOAL, "requires", "irequires", "'l1 irequires l0' cannot be read"),
    ],
)
def test_what_cannot_be_read_is_named(written, old, new, message):
    with pytest.raises(ScheduleError, match=message):
        READ[written](written(3).replace(old, new, 1))


def test_deadlock_and_overtaking_are_named():
    exchange = [("r", "i0", "s0", ""), ("s", "i0", "i0", ""), ("re", "s0", "i0", "")]
    with pytest.raises(ScheduleError, match="deadlock"):
        msccl.read(plans.msccl("both wait", 1, [[(1, 1, exchange)], [(0, 0, exchange)]]))
    assert isinstance(goal.read("num_ranks 1\nrank 0 {\nl1: calc 5\n}"), Schedule)
