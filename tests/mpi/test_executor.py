"""Executors over MPI give, to the bit, what the loopback definition gives: every scheme, every chunking."""

from __future__ import annotations

import numpy as np
import pytest

from tests.made_partials import own_part, partials
from treeattn import RestrictionError, collectives
from treeattn import comm as comm_
from treeattn.backends.cpu import MergeOperator
from treeattn.collectives import check
from treeattn.collectives.executors import loopback, mpi, program, slots
from treeattn.collectives.reducer import Reduction

pytestmark = pytest.mark.mpi

HEAD_DIM = 16
OPERATOR = MergeOperator(HEAD_DIM, np.dtype(np.float32))


def slots_over(nodes_of):
    """Slots between ranks of the nodes that `nodes_of` a size says; None: of the machine."""

    def reducer(reduction, schedule):
        nodes = nodes_of(reduction.comm.size) if nodes_of else comm_.node_groups(reduction.comm)
        return slots.Reducer(reduction, schedule, nodes=nodes, crowded=reduction.comm.size > 2)

    return reducer


def pairs(size):
    return tuple(tuple(range(first, min(first + 2, size))) for first in range(0, size, 2))


def dealt(size):
    return tuple(tuple(range(first, size, 2)) for first in range(min(size, 2)))


REDUCERS = {
    "mpi": mpi.Reducer,
    "program": program.Reducer,
    "slots": slots_over(None),
    "slots in pairs": slots_over(pairs),
    "slots of ranks dealt out": slots_over(dealt),
}


@pytest.fixture(params=REDUCERS)
def reducer_of(request):
    """What plans a schedule, of each executor in turn."""
    return REDUCERS[request.param]


@pytest.mark.parametrize("records", [1, 3, 16])
@pytest.mark.parametrize("scheme", collectives.names("schedule"))
def test_same_bits_as_loopback(comm, reducer_of, scheme, records):
    schedule = collectives.build(scheme, comm.size)
    values = partials(comm.size, records, HEAD_DIM)
    wanted = loopback.run(schedule, values, OPERATOR)[comm.rank]
    buffer = values[comm.rank].copy()
    if reducer_of not in (mpi.Reducer, program.Reducer) and records < check(schedule).in_step_from:
        with pytest.raises(RestrictionError, match="some rank gets none"):
            reducer_of(Reduction(comm, OPERATOR, buffer), schedule)
        return
    with reducer_of(Reduction(comm, OPERATOR, buffer), schedule) as reducer:
        for _ in range(3):
            buffer[:] = values[comm.rank]
            reducer()
            np.testing.assert_array_equal(own_part(schedule, comm.rank, buffer), wanted)


def test_unlike_nodes(comm, reducer_of):
    """Node groups in any order: scattered over the ranks, of unlike sizes."""
    order = np.random.default_rng(5).permutation(comm.size).tolist()
    cut = max(1, comm.size // 3)
    nodes = tuple(tuple(part) for part in (order[:cut], order[cut:]) if part)
    schedule = collectives.build("hierarchical:inner=chain", comm.size, nodes=nodes)
    values = partials(comm.size, 5, HEAD_DIM, seed=1)
    buffer = values[comm.rank].copy()
    with reducer_of(Reduction(comm, OPERATOR, buffer), schedule) as reducer:
        reducer()
    np.testing.assert_array_equal(buffer, loopback.run(schedule, values, OPERATOR)[comm.rank])


@pytest.mark.parametrize("records", [4, 40_000])
def test_swap_in_one_round_reads_the_state_before_it(comm, reducer_of, records):
    """Neighbours copy to each other in the same round: neither may see the other's new value.

    Large messages leave the buffer late: that is where a copy that lands too early shows.
    """
    from treeattn.collectives import Schedule, Transfer

    pairs = [(a, a + 1) for a in range(0, comm.size - 1, 2)]
    swap = tuple(Transfer(*ends, range(1), False) for a, b in pairs for ends in ((a, b), (b, a)))
    total = collectives.build("recursive_doubling", comm.size)
    schedule = Schedule("swap first", comm.size, 1, ((swap,) if swap else ()) + total.rounds)
    values = partials(comm.size, records, HEAD_DIM, seed=2)
    buffer = values[comm.rank].copy()
    with reducer_of(Reduction(comm, OPERATOR, buffer), schedule) as reducer:
        reducer()
    np.testing.assert_array_equal(buffer, loopback.run(schedule, values, OPERATOR)[comm.rank])


def test_start_and_wait_leave_room_for_other_work(comm, reducer_of):
    schedule = collectives.build("recursive_doubling", comm.size)
    values = partials(comm.size, 4, HEAD_DIM, seed=3)
    buffer = values[comm.rank].copy()
    with reducer_of(Reduction(comm, OPERATOR, buffer), schedule) as reducer:
        reducer.start()
        comm.allgather("other work on the user's communicator")
        reducer.wait()
    np.testing.assert_array_equal(buffer, loopback.run(schedule, values, OPERATOR)[comm.rank])


def test_close_finishes_a_step_in_flight(comm, reducer_of):
    schedule = collectives.build("recursive_doubling", comm.size)
    values = partials(comm.size, 4, HEAD_DIM, seed=6)
    buffer = values[comm.rank].copy()
    reducer = reducer_of(Reduction(comm, OPERATOR, buffer), schedule)
    reducer.start()
    reducer.close()
    np.testing.assert_array_equal(buffer, loopback.run(schedule, values, OPERATOR)[comm.rank])


def test_two_reducers_in_flight_do_not_mix(comm, reducer_of):
    schedule = collectives.build("binary_tree", comm.size)
    first, second = partials(comm.size, 2, HEAD_DIM, seed=4), partials(comm.size, 2, HEAD_DIM, seed=5)
    a, b = first[comm.rank].copy(), second[comm.rank].copy()
    with (
        reducer_of(Reduction(comm, OPERATOR, a), schedule) as one,
        reducer_of(Reduction(comm, OPERATOR, b), schedule) as other,
    ):
        one.start()
        other.start()
        other.wait()
        one.wait()
    np.testing.assert_array_equal(a, loopback.run(schedule, first, OPERATOR)[comm.rank])
    np.testing.assert_array_equal(b, loopback.run(schedule, second, OPERATOR)[comm.rank])


def test_wrong_schedules_are_refused_before_anything_is_sent(comm, reducer_of):
    from treeattn import ScheduleError
    from treeattn.collectives import Schedule, Transfer

    twice = (Transfer(0, 1),) if comm.size > 1 else (Transfer(0, 0),)
    schedule = Schedule("counts twice", comm.size, 1, (twice, twice))
    with pytest.raises(ScheduleError):
        reducer_of(Reduction(comm, OPERATOR, np.zeros((1, HEAD_DIM + 2), np.float32)), schedule)
