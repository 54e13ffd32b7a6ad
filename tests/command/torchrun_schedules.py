"""Every schedule over gloo, and by slots with its messages between nodes: a program of
test_torchrun.py that takes numbers of records."""

from __future__ import annotations

import sys

import numpy as np
import torch.distributed as dist

from tests.support.torchrun import without_mpi
from treeattn import collectives
from treeattn.backends.cpu.records import MergeOperator
from treeattn.collectives.executors import compiled, interpreter, loopback
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.errors import RestrictionError
from treeattn.mpi import communicators

OPERATOR = MergeOperator(16)


def schedules(size):
    """Those that are run at so many ranks; node groups are of two ranks and the rest."""
    nodes = (tuple(range(2)), tuple(range(2, size)))
    for name in (*collectives.names("schedule"), "k_nomial_tree:radix=4"):
        try:
            needs = collectives.needs_nodes(name)
            yield collectives.build(name, size, **({"nodes": nodes} if needs else {}))
        except RestrictionError:
            continue
    yield collectives.to_root(collectives.build("binary_tree", size))


def by_slots(spec, schedule):
    """As if the ranks were of two nodes, and of one where they are two."""
    nodes = ((0, 1), tuple(range(2, schedule.size)))
    nodes = nodes[: 1 + (schedule.size > 2)]
    return compiled.plan(spec, schedule, nodes=nodes, oversubscribed=True)


def check(planner, comm, schedule, records, draw):
    values = [draw.standard_normal((records, OPERATOR.width)).astype(np.float32) for _ in range(comm.size)]
    for value in values:
        value[:, 1] = np.abs(value[:, 1]) + 0.5
    buffer = np.empty_like(values[0])
    wanted = loopback.run(schedule, values, OPERATOR)[comm.rank]
    own = schedule.chunk_slice(range(comm.rank, comm.rank + 1), records)
    with planner(ReductionSpec(comm, OPERATOR, buffer), schedule) as reducer:
        for halves in (False, True, False):  # steps of one plan follow one another
            np.copyto(buffer, values[comm.rank])
            if halves:
                reducer.start()
                reducer.wait()
            else:
                reducer()
            if schedule.result == "root" and comm.rank:
                continue
            result = buffer[own] if schedule.result == "scattered" else buffer
            assert result.tobytes() == wanted.tobytes(), (schedule.name, records)


def main():
    dist.init_process_group("gloo")
    comm, draw = communicators.intracomm(None), np.random.default_rng(7)
    ran = []
    for schedule in schedules(comm.size):
        for records in map(int, sys.argv[1:]):
            check(interpreter.InterpretedReducer, comm, schedule, records, draw)
            check(by_slots, comm, schedule, records, draw)
        ran.append(schedule.name)
    assert len(ran) > 15, ran
    assert comm.allgather(ran) == [ran] * comm.size
    without_mpi()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
