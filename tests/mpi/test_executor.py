"""The contract of reducers over real ranks: executors over MPI, and what a library reduces."""

import numpy as np
import pytest

from tests.support.partials import partials
from tests.support.reducer_contract import HEAD_DIM, OPERATOR, OneRank, OverRanks, plain, promised, wanted
from treeattn import collectives
from treeattn.baselines import BASELINES, two_allreduce
from treeattn.collectives import Schedule, Transfer
from treeattn.collectives.executors import compiled, interpreter
from treeattn.collectives.libraries import mpi_allreduce
from treeattn.errors import ScheduleError

pytestmark = pytest.mark.many_ranks


class Schedules(OverRanks):
    @pytest.mark.parametrize("records", [4, 40_000])
    def test_swap_in_one_round_reads_the_state_before_it(self, records):
        """Large messages leave the buffer late: that is where a copy that lands too early shows.
        Each rank folds those of all, hence fewer records where ranks are many."""
        records = min(records, 120_000 // self.size)
        ends = [(a, a + 1) for a in range(0, self.size - 1, 2)]
        swap = tuple(Transfer(*way, range(1), False) for a, b in ends for way in ((a, b), (b, a)))
        total = collectives.build("recursive_doubling", self.size)
        rounds = ((swap,) if swap else ()) + total.rounds
        self.check_bits(plain(Schedule("swap first", self.size, 1, rounds), self.size, records))

    def test_other_work_goes_on_between_start_and_wait(self):
        ranks = self.plan(plain(collectives.build("recursive_doubling", self.size), self.size))
        (reducer,) = ranks.reducers.values()
        reducer.start()
        self.comm.allgather("other work on the user's communicator")
        reducer.wait()
        ranks.close()


class TestMpi(Schedules):
    def reducer(self, spec, case):
        return interpreter.InterpretedReducer(spec, case.schedule)


class TestProgram(Schedules):
    def reducer(self, spec, case):
        return compiled.plan(spec, case.schedule, oversubscribed=self.size > 2)


class TestSlots(Schedules):
    """Over the nodes of the machine."""

    def nodes(self, case):
        return self.comm.nodes

    def reducer(self, spec, case):
        nodes, oversubscribed = self.nodes(case), self.size > 2
        return compiled.plan(spec, case.schedule, nodes=nodes, oversubscribed=oversubscribed)


class TestSlotsOfSeveralNodes(TestSlots):
    """Drawn ones: parts of the machine's, as long as it is one node."""

    def nodes(self, case):
        return case.nodes if len(self.comm.nodes) == 1 else super().nodes(case)


class Libraries(OverRanks):
    """The library chooses the order: within rounding of the definition, and whatever the schedule."""

    ranks = OneRank
    outcome = "chain"  # a schedule that leaves the same

    def test_bits_of_the_definition(self):
        """Of several numbers of records: no schedule is to be drawn."""
        for records, granularity in ((1, 1), (9, 1), (8, 2), (3, 3), (120, 3)):
            case = plain(collectives.build(self.outcome, self.size), self.size, records)
            self.check_bits(case._replace(granularity=granularity, seed=records))

    def check_bits(self, case):
        ranks = self.plan(case)
        for number in range(3):
            values = partials(self.size, case.records, HEAD_DIM, seed=case.seed + number)
            self.step(ranks, case, values, halves=number == 1)
            self.check_result(ranks, case, values)
        ranks.close()

    def check_result(self, ranks, case, values):
        """Records on the scale of their maxima: those of an empty shard count for nothing."""
        like = case._replace(schedule=collectives.build(self.outcome, self.size))
        (buffer,) = ranks.buffers.values()
        found, expected = (
            one.reshape(-1, OPERATOR.width)
            for one in (promised(like, self.comm.rank, buffer), wanted(like, values)[self.comm.rank])
        )
        np.testing.assert_array_equal(found[:, 0], expected[:, 0])
        np.testing.assert_allclose(found[:, 1:], expected[:, 1:], rtol=1e-5, atol=1e-4)

    def test_wrong_schedules_are_refused_before_anything_is_sent(self):
        """There is none; the buffer is looked at alike."""
        for array in (np.zeros((2, 20), np.float32)[:, ::2], np.zeros((2, OPERATOR.width))):
            with pytest.raises(ScheduleError, match="the buffer must be C-contiguous float32"):
                self.plan(plain(collectives.build("chain", self.size), self.size), [array] * self.size)


class TestMpiAllreduce(Libraries):
    def reducer(self, spec, case):
        return mpi_allreduce.plan(spec)


class TestTwoAllreduces(Libraries):
    def reducer(self, spec, case):
        return two_allreduce.RescaledSumOverMpi("two_allreduce", spec, calls=2)


class TestThreeAllreduces(Libraries):
    def reducer(self, spec, case):
        return two_allreduce.RescaledSumOverMpi("three_allreduce", spec, calls=3)


class TestHeadAllToAll(Libraries):
    outcome = "head_scatter"

    def reducer(self, spec, case):
        return BASELINES["head_all_to_all"].plan(spec)
