"""All ranks of a job as threads of this process, which run schedules by the loopback."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections import defaultdict, deque
from unittest import mock

from treeattn.collectives.executors import loopback
from treeattn.collectives.runtime.communicator import Member, node_groups
from treeattn.collectives.runtime.reducer import Owner, Reducer
from treeattn.decoder import reducers
from treeattn.mpi import communicators

__all__ = ["ThreadJob", "on_all_ranks"]

PATIENCE = 60  # seconds for what the other threads do at once


class ThreadJob:
    """`size` ranks, two of them to a node. One thread works at a time; another goes on where it waits."""

    def __init__(self, size):
        self.size, self.turn, self.failed = size, threading.Condition(), set()
        self.told, self.mail = defaultdict(dict), defaultdict(deque)  # by round; by sender and receiver
        self.comms = [ThreadRank(self, rank) for rank in range(size)]

    def on_each(self, call):
        """What ``call(comm)`` gives or raises on each rank, in order."""
        results = [None] * self.size

        def run(rank):
            with self.turn:
                try:
                    results[rank] = call(self.comms[rank])
                except Exception as error:
                    results[rank] = error
                    self.failed.add(rank)
                self.turn.notify_all()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def wait(self, ranks, done):
        """Let the other threads go on until it is done by those ranks."""
        self.turn.notify_all()
        self.turn.wait_for(lambda: done() or self.failed & ranks(), PATIENCE)
        if not done():
            raise RuntimeError(f"rank {ranks()} failed, or never came")


class ThreadRank:
    """One rank's view: a `Communicator` whose schedules `loopback.run` runs."""

    library = "torch"  # nothing of it is MPI's

    def __init__(self, job, rank):
        self._job, self.rank, self.size, self._round = job, rank, job.size, 0
        self.members = tuple(Member.here(rank, rank // 2 * 2) for rank in range(job.size))
        self.nodes = node_groups(self.members)
        self.owner = Owner("the communicator of a thread")

    def allgather(self, mine):
        self._round += 1
        told = self._job.told[self._round]
        told[self.rank] = pickle.dumps(mine)
        everyone = set(range(self.size))
        self._job.wait(lambda: everyone - told.keys(), lambda: len(told) == self.size)
        return [pickle.loads(told[rank]) for rank in range(self.size)]

    def bcast(self, obj, root=0):
        return self.allgather(obj)[root]

    def bcast_array(self, array, root):
        array[...] = self.bcast(array, root)

    def barrier(self):
        self.allgather(None)

    def exchange(self, receive, send):
        (into, source), (out, target) = receive, send
        self._job.mail[self.rank, target].append(out.copy())
        mail = self._job.mail[source, self.rank]

        def wait():
            self._job.wait(lambda: {source}, lambda: mail)
            into[...] = mail.popleft()

        return wait

    def dup(self):
        return self

    lent = dup

    def free(self):
        """Nothing was taken."""


class LoopbackReducer(Reducer):
    """A schedule over the records of all threads, by its definition."""

    def __init__(self, spec, schedule):
        super().__init__(schedule.name)
        self._spec, self._schedule = spec, schedule

    def _begin(self):
        """All of it is done at the end."""

    def _complete(self):
        spec, rank = self._spec, self._spec.comm.rank
        records = spec.records(self.name)
        everyone = spec.comm.allgather(records)
        records[:] = loopback.run(self._schedule, everyone, spec.operator)[rank]

    def _release(self):
        """Nothing is held."""


@contextlib.contextmanager
def by_loopback():
    """Decoders, caches and sessions take these communicators too."""
    given, run_rounds = communicators.intracomm, reducers.run_rounds

    def intracomm(comm):
        return comm if isinstance(comm, ThreadRank) else given(comm)

    def run(executor, schedule, reduction):
        ours = isinstance(reduction.comm, ThreadRank)
        return LoopbackReducer(reduction, schedule) if ours else run_rounds(executor, schedule, reduction)

    with (
        mock.patch.object(communicators, "intracomm", intracomm),
        mock.patch.object(reducers, "run_rounds", run),
    ):
        yield


def on_all_ranks(size, call):
    """What ``call(comm)`` gives or raises on each rank of a job of its own, in order."""
    return ThreadJob(size).on_each(call)
