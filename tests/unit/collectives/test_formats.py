"""Collectives that others describe: read, proved, simulated; damaged ones refused."""

import random

import pytest

from tests.support import plans
from treeattn.collectives import build, check
from treeattn.collectives.clusters import description, placement
from treeattn.collectives.clusters.simulate import Payload, simulate
from treeattn.collectives.drawings import text as draw
from treeattn.collectives.formats import msccl
from treeattn.errors import ScheduleError

WRITTEN = (plans.msccl_ring, plans.msccl_all_pairs)
MUTANTS = 200


@pytest.mark.parametrize("written", WRITTEN, ids=lambda written: written.__name__)
def test_published_algorithms_are_read_proved_and_simulated(written):
    cluster = description.load("dgx-h100")
    for size in (2, 3, 5, 8):
        schedule = msccl.read(written(size))
        found = check(schedule)
        assert found.determinism == "A"
        assert found.messages == 2 * size * (size - 1)
        places = placement.PLACEMENTS["block"](cluster, size)
        assert simulate(schedule, cluster, places, Payload(16, 520)).time > 0
        assert schedule.name in draw.text(schedule)


def test_a_ring_is_the_ring_of_the_catalogue():
    read, ours = msccl.read(plans.msccl_ring(4)), build("ring", 4)
    assert [len(round_) for round_ in read.rounds] == [len(round_) for round_ in ours.rounds]
    assert check(read) == check(ours)


@pytest.mark.parametrize("written", WRITTEN, ids=lambda it: it.__name__)
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
            check(msccl.read("\n".join(steps)))
        except ScheduleError as error:
            refused.append(str(error))
    assert len(refused) > MUTANTS / 2
    assert not any("\n" in text for text in refused)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('coll="allreduce"', 'coll="alltoall"', "no reduction"),
        ('type="rrs"', 'type="rcx"', "gpu 0, tb 0, step 1: type='rcx' cannot be read"),
        ('ngpus="3"', 'ngpus="4"', "the gpus are not 0 to 3"),
        ('srcbuf="i"', 'srcbuf="x"', "none of i, o, s"),
        ("<algo", "<algorithm", "not XML"),
        ('recv="2"', 'recv="0"', "no other gpu"),
    ],
)
def test_what_cannot_be_read_is_named(old, new, message):
    with pytest.raises(ScheduleError, match=message):
        msccl.read(plans.msccl_ring(3).replace(old, new, 1))


def test_deadlock_and_overtaking_are_named():
    exchange = [("r", "i0", "s0", ""), ("s", "i0", "i0", ""), ("re", "s0", "i0", "")]
    with pytest.raises(ScheduleError, match="deadlock"):
        msccl.read(plans.msccl("both wait", 1, [[(1, 1, exchange)], [(0, 0, exchange)]]))
