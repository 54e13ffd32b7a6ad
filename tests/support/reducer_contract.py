"""What every reducer promises, whatever runs it: one class of tests, a subclass for each executor."""

from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.settings import fuzzed
from tests.support.partials import own_part, partials
from tests.support.schedules import Case, cases
from treeattn.backends.cpu import MergeOperator
from treeattn.collectives import Schedule, Transfer, build, check
from treeattn.collectives.executors import loopback
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.errors import ScheduleError, StateError

HEAD_DIM = 8
OPERATOR = MergeOperator(HEAD_DIM)


class Rows:
    """Records that are never cut apart, as one record of a loopback."""

    def __init__(self, granularity, operator=OPERATOR):
        self._records = operator
        self.width, self.dtype = granularity * operator.width, operator.dtype

    def planned_merge(self, into, other):
        width = self._records.width
        return self._records.planned_merge(into.reshape(-1, width), other.reshape(-1, width))


def wanted(case, values, operator=OPERATOR):
    """What each rank is promised, by definition."""
    rows = [value.reshape(-1, case.granularity * operator.width) for value in values]
    return loopback.run(case.schedule, rows, Rows(case.granularity, operator))


def promised(case, rank, buffer):
    """The same part of what a rank holds."""
    return own_part(case.schedule, rank, buffer.reshape(-1, case.granularity * buffer.shape[1]))


def plain(schedule, size, records=4):
    """A case without anything drawn, on one node of so many ranks."""
    return Case(schedule, (tuple(range(size)),), records, 1, 0)


class Ranks:
    """Reducers of those ranks of a case that are in this process, and how they go on: here by themselves."""

    def __init__(self, reducers, buffers):
        self.reducers, self.buffers = reducers, buffers

    def call(self):
        """One whole step of all of them."""
        for reducer in self.reducers.values():
            reducer()

    def settle(self):
        """Until nothing is left of steps that have started."""
        left = list(self.reducers.values())
        while left:
            left = [reducer for reducer in left if not reducer.test()]

    def close(self):
        for reducer in self.reducers.values():
            reducer.close()


class OneRank(Ranks):
    """What can do nothing without waiting, and so is never done before `wait`."""

    def settle(self):
        for reducer in self.reducers.values():
            reducer.test()


class ReducerContract:
    """`plan(case)` gives `Ranks`; `sizes` draws their number; `for_each` calls a check with drawn cases."""

    def planned(self, stack, case):
        ranks = self.plan(case)
        stack.callback(ranks.close)
        return ranks

    def step(self, ranks, case, values, halves):
        for rank, buffer in ranks.buffers.items():
            buffer[:] = values[rank]
        if halves:
            for reducer in ranks.reducers.values():
                reducer.start()
            ranks.settle()
            for reducer in ranks.reducers.values():
                reducer.wait()
        else:
            ranks.call()

    def check_result(self, ranks, case, values):
        results = wanted(case, values)
        for rank, buffer in ranks.buffers.items():
            np.testing.assert_array_equal(promised(case, rank, buffer), results[rank])

    def test_bits_of_the_definition(self):
        """In whole steps and in halves, over steps that use all memory again; counted as they are sent."""
        self.for_each(cases(self.sizes), self.check_bits)

    def check_bits(self, case):
        with ExitStack() as stack:
            ranks = self.planned(stack, case)
            for number in range(5):
                values = partials(case.schedule.size, case.records, HEAD_DIM, seed=case.seed + number)
                self.step(ranks, case, values, halves=number in (1, 2))
                self.check_result(ranks, case, values)
            for rank, reducer in ranks.reducers.items():
                counted = case.schedule.traffic(case.records, case.granularity)
                sent = [(m.dst, m.records * OPERATOR.width * 4) for m in counted if m.src == rank]
                assert reducer.sent == sent
                assert reducer.certificate == check(case.schedule)

    def test_one_step_at_a_time_and_none_after_the_end(self):
        case = plain(build("recursive_doubling", self.size), self.size)
        ranks = self.plan(case)
        for reducer in ranks.reducers.values():
            for call in (reducer.wait, reducer.test):
                with pytest.raises(StateError, match=rf"{reducer.name}: \w+\(\) without start"):
                    call()
            reducer.start()
            for call in (reducer, reducer.start):
                with pytest.raises(StateError, match="already running"):
                    call()
        ranks.settle()
        ranks.close()
        ranks.close()
        for reducer in ranks.reducers.values():
            for call in (reducer, reducer.start):
                with pytest.raises(StateError, match="closed"):
                    call()

    def test_close_ends_a_step_in_flight(self):
        case = plain(build("binary_tree", self.size), self.size)
        values = partials(self.size, case.records, HEAD_DIM, seed=6)
        ranks = self.plan(case)
        for rank, buffer in ranks.buffers.items():
            buffer[:] = values[rank]
        for reducer in ranks.reducers.values():
            reducer.start()
        ranks.settle()
        ranks.close()
        self.check_result(ranks, case, values)

    def test_two_reducers_in_flight_do_not_mix(self):
        case = plain(build("binary_tree", self.size), self.size)
        with ExitStack() as stack:
            both = [self.planned(stack, case) for _ in range(2)]
            values = [partials(self.size, case.records, HEAD_DIM, seed=seed) for seed in (4, 5)]
            for ranks, of_ranks in zip(both, values, strict=True):
                for rank, reducer in ranks.reducers.items():
                    ranks.buffers[rank][:] = of_ranks[rank]
                    reducer.start()
            for ranks, of_ranks in reversed(list(zip(both, values, strict=True))):
                ranks.settle()
                for reducer in ranks.reducers.values():
                    reducer.wait()
                self.check_result(ranks, case, of_ranks)

    def test_wrong_schedules_are_refused_before_anything_is_sent(self):
        size, twice = self.size, (Transfer(0, 1 % self.size),)
        wrong = {
            "names a rank|itself|twice|lacks": Schedule("wrong", size, 1, (twice, twice)),
            f"made for {size + 1} ranks, the communicator has {size}": build("chain", size + 1),
        }
        for said, schedule in wrong.items():
            with pytest.raises(ScheduleError, match=said):
                self.plan(plain(schedule, size))
        for array in (np.zeros((2, 2 * OPERATOR.width), np.float32)[:, ::2], np.zeros((2, OPERATOR.width))):
            with pytest.raises(ScheduleError, match="chain: the buffer must be C-contiguous float32"):
                self.plan(plain(build("chain", size), size), buffers=[array] * size)


class OverRanks(ReducerContract):
    """One rank of each case is here; rank 0 draws, on fewer than 5 ranks so many."""

    ranks, drawn = Ranks, 30

    @pytest.fixture(autouse=True)
    def _comm(self, comm):
        self.comm, self.size, self.sizes = comm, comm.size, st.just(comm.size)

    def for_each(self, strategy, check):
        drawn = []
        if self.comm.rank == 0:
            each = settings(fuzzed(self.drawn if self.size < 5 else 10), phases=[Phase.generate])
            each(given(strategy)(lambda case: drawn.append(case)))()
        for case in self.comm.bcast(drawn):
            check(case)

    def plan(self, case, buffers=None):
        rank = self.comm.rank
        array = buffers[rank] if buffers else np.zeros((case.records, OPERATOR.width), np.float32)
        spec = ReductionSpec(self.comm, OPERATOR, array, case.granularity)
        return self.ranks({rank: self.reducer(spec, case)}, {rank: array})
