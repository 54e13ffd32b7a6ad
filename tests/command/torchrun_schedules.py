"""The contract of reducers over the ranks of torchrun, on which test_torchrun.py runs it."""

from tests.support.reducer_contract import OneRank, OverRanks
from treeattn.collectives.executors import compiled, interpreter


class TestMessages(OverRanks):
    """Other messages than MPI's, for which tests/mpi/test_executor.py draws more."""

    ranks, drawn = OneRank, 10

    def reducer(self, spec, case):
        return interpreter.InterpretedReducer(spec, case.schedule)


class TestSlots(TestMessages):
    """As if the ranks were of two nodes, and of one where they are two."""

    def reducer(self, spec, case):
        nodes = ((0, 1), tuple(range(2, self.size)))[: 1 + (self.size > 2)]
        return compiled.plan(spec, case.schedule, nodes=nodes, oversubscribed=True)
