"""What ranks on GPUs must do: run by every rank, on GPUs or on what stands in for GPUs and NCCL.

    mpiexec -n 4 python -m mpi4py tests/gpu/over_ranks.py TRANSPORT [--drawn N]
        [--two-nodes] [--stand-ins [--damaged]]

Every schedule over TRANSPORT, "nccl" or "peer", has the bits of ``transport="host"``, step after step and
captured. NCCL's own all-reduce is within the bounds. Ranks may share a GPU where NCCL lets them. With
--two-nodes the halves of the ranks are taken for nodes, between which NCCL sends, wherever they run.
"""

import hashlib
import os
import random
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpi4py import MPI

import treeattn
from tests.emulator.cases import Case
from tests.emulator.runtime import EmulatorRuntime
from tests.support.nccl import NcclOverMpi
from treeattn import collectives
from treeattn.backends import device as devices
from treeattn.backends.cuda import cupy_runtime
from treeattn.collectives.runtime import nccl
from treeattn.collectives.runtime.mpi_communicator import MpiCommunicator
from treeattn.mpi import communicators
from treeattn.selection import select
from treeattn.shards import parse_layout

WORLD = MPI.COMM_WORLD
CASE = Case("float32", 64, group=2, batch=2, queries=2, tokens=33)
REPLAYS = {"nccl": 1, "peer": 8}


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


def stand_in(damaged=False):
    """One emulated GPU for all ranks, and NCCL made of MPI."""
    runtime = EmulatorRuntime()
    cupy_runtime.current = lambda: runtime
    cupy_runtime.choose = lambda index: None
    nccl.problem = lambda: None
    nccl.version = lambda: (2, 30)
    nccl.connect = Damaged if damaged else NcclOverMpi


def on_two_nodes():
    """The first half of the ranks on one, and so on."""
    half, ranks = WORLD.size // 2, tuple(range(WORLD.size))
    MpiCommunicator.nodes = property(lambda comm: (ranks[:half], ranks[half:]))


def planned(scheme, transport):
    """A decoder of `CASE`."""
    output = "heads" if select(scheme).row.scattered else "replicated"
    reduction = treeattn.Reduction(scheme, transport=transport, output=output)
    return treeattn.Decoder(WORLD, **CASE.plan, scheme=reduction)


def inputs(device):
    """q and this rank's part of k and v, and lengths, on the device."""
    q, k, v, _, _ = CASE.inputs()
    (run,) = parse_layout("contiguous").runs(CASE.tokens, WORLD.rank, WORLD.size)
    lengths = np.full(CASE.batch, run.stop - run.start, np.int64)
    return [device.from_host(np.ascontiguousarray(array)) for array in (q, k[:, run], v[:, run], lengths)]


def results(device, decoder, step):
    """out and lse of one step, on the host."""
    arrays = step()
    decoder.synchronize()
    return [device.to_host(array) for array in arrays]


def by_the_host(device, given, scheme):
    """What every other transport must give, to the bit."""
    with planned(scheme, "host") as staged:
        return results(device, staged, lambda: staged(*given))


def over(transport, device, given, scheme):
    """The results of three steps and of captured ones, each followed by a step as before."""
    with planned(scheme, transport) as decoder:
        nodes = communicators.world().nodes
        assert transport == "nccl" or decoder.executor == ("peer" if len(nodes) == 1 else "peer_nccl")
        found = [results(device, decoder, lambda: decoder(*given)) for _ in range(3)]
        step = decoder.capture(*given)
        for _ in range(REPLAYS[transport]):
            found += [results(device, decoder, one) for one in (step, lambda: decoder(*given))]
    return found


def check_schedule(transport, device, given, scheme):
    wanted = by_the_host(device, given, scheme)
    for found in over(transport, device, given, scheme):
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(got, want)
    if wanted[0].shape[2] == CASE.heads:  # not a slice of heads
        CASE.check(*wanted, tensor_cores=False)


def check_library(transport, device, given, scheme):
    steps = over(transport, device, given, scheme)
    digests = [hashlib.sha256(out.tobytes() + lse.tobytes()).hexdigest() for out, lse in steps]
    if len(set(map(tuple, WORLD.allgather(digests)))) > 1 and WORLD.rank == 0:
        print(f"{scheme}: ranks ended with different bits, which NCCL does not promise to be equal")
    for found in steps:
        CASE.check(*found, tensor_cores=False)


def main():
    """Exits with 1 if a check failed."""
    transport, *options = sys.argv[1:]
    if "--stand-ins" in options:
        stand_in("--damaged" in options)
        if transport == "peer":
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # not every launcher hands it on to other nodes
    else:  # to NCCL, ranks that share a GPU are of different hosts, over sockets of this machine
        os.environ.setdefault("NCCL_HOSTID", f"rank{WORLD.rank}")
        os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    if "--two-nodes" in options:
        on_two_nodes()
    schemes = collectives.names("schedule")
    if "--drawn" in options:
        schemes = random.Random(0).sample(schemes, int(options[options.index("--drawn") + 1]))
    checks = dict.fromkeys(schemes, check_schedule)
    if transport == "nccl":
        checks |= dict.fromkeys(("nccl_allreduce", "nccl_allreduce:calls=3"), check_library)
    cupy_runtime.choose(communicators.node_local_rank(WORLD))
    device, wrong = devices.find("cuda"), {}
    given = inputs(device)
    for scheme, check in checks.items():
        try:
            check(transport, device, given, scheme)
        except AssertionError as error:  # others end the job
            wrong[scheme] = str(error).strip().partition("\n")[0] or "beyond its bounds"
    everyone = WORLD.allgather(wrong)
    if WORLD.rank == 0:
        for rank, found in enumerate(everyone):
            for scheme, why in found.items():
                print(f"rank {rank}: {scheme}: {why}")
        print(f"{len(checks)} schemes over {WORLD.size} ranks")
    sys.exit(int(any(everyone)))


if __name__ == "__main__":
    main()
