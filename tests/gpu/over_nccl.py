"""What ranks over NCCL must do: run by every rank, with NCCL itself or with what stands in for GPUs and NCCL.

    mpiexec -n 4 python -m mpi4py tests/gpu/over_nccl.py [--stand-ins [--damaged]]

Every schedule over ``transport="nccl"`` has the bits of ``transport="host"``: as it is queued, as a graph and
as a captured step. NCCL's own all-reduce is within the bounds. Ranks may share a GPU where NCCL lets them.
"""

import hashlib
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import over_ranks
from over_ranks import CASE, WORLD, results

from tests.support.nccl import NcclOverMpi
from treeattn import collectives
from treeattn.collectives.runtime import nccl

# Before NCCL starts: ranks that share a GPU are ranks of different hosts to it, over sockets of this machine.
if "--stand-ins" not in sys.argv:
    os.environ.setdefault("NCCL_HOSTID", f"rank{WORLD.rank}")
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}

LIBRARY = ("nccl_allreduce", "nccl_allreduce:calls=3")


class Damaged(NcclOverMpi):
    """The last rank receives one wrong bit."""

    def exchange(self, receives, sends):
        super().exchange(receives, sends)
        if receives and self.rank == self.size - 1:
            into = self._runtime.inside(receives[0][0])
            self._runtime.queue(lambda: into.reshape(-1).view(np.uint32).__ixor__(1))

    def all_reduce(self, array, operation):
        super().all_reduce(array, operation)
        if operation == "sum":
            self._runtime.queue(lambda: array.__imul__(2))


def stand_in(damaged):
    """One emulated GPU for all ranks, and NCCL made of MPI."""
    over_ranks.stand_in()
    nccl.problem = lambda: None
    nccl.version = lambda: (2, 30)
    nccl.connect = Damaged if damaged else NcclOverMpi


def over_nccl(device, given, scheme):
    """Three steps and a captured one."""
    with over_ranks.planned(scheme, "nccl") as decoder:
        found = [results(device, decoder, lambda: decoder(*given)) for _ in range(3)]
        found.append(results(device, decoder, decoder.capture(*given)))
    return found


def check_schedule(device, given, scheme):
    wanted = over_ranks.by_the_host(device, given, scheme)
    for found in over_nccl(device, given, scheme):
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(got, want)
    if wanted[0].shape[2] == CASE.heads:  # not a slice of heads
        CASE.check(*wanted, tensor_cores=False)


def check_library(device, given, scheme):
    steps = over_nccl(device, given, scheme)
    digests = [hashlib.sha256(out.tobytes() + lse.tobytes()).hexdigest() for out, lse in steps]
    if len(set(map(tuple, WORLD.allgather(digests)))) > 1 and WORLD.rank == 0:
        print(f"{scheme}: ranks ended with different bits, which NCCL does not promise to be equal")
    for found in steps:
        CASE.check(*found, tensor_cores=False)


if __name__ == "__main__":
    if "--stand-ins" in sys.argv:
        stand_in("--damaged" in sys.argv)
    schedules = dict.fromkeys(over_ranks.drawn(collectives.names("schedule")), check_schedule)
    over_ranks.run(schedules | dict.fromkeys(LIBRARY, check_library))
