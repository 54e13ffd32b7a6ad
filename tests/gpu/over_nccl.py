"""What ranks over NCCL must do: run by every rank, with NCCL itself or with what stands in for GPUs and NCCL.

    mpiexec -n 4 python -m mpi4py tests/gpu/over_nccl.py [--stand-ins [--damaged]]

Every schedule over ``transport="nccl"`` has the bits of ``transport="host"``: as it is queued, as a graph and
as a captured step. NCCL's own all-reduce is within the bounds. Ranks may share a GPU where NCCL lets them.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "mpi")]

from emulator.cases import Case  # noqa: E402
from emulator.runtime import EmulatorRuntime  # noqa: E402
from mpi4py import MPI  # noqa: E402
from nccl_over_mpi import NcclOverMpi  # noqa: E402

import treeattn  # noqa: E402
from treeattn import collectives  # noqa: E402
from treeattn import comm as comm_  # noqa: E402
from treeattn.backends.cuda import cupy_runtime  # noqa: E402
from treeattn.collectives import nccl  # noqa: E402
from treeattn.decoder import device as devices  # noqa: E402
from treeattn.decoder.plan import select  # noqa: E402
from treeattn.shards import parse_layout  # noqa: E402

WORLD = MPI.COMM_WORLD
CASE = Case("float32", 64, group=2, batch=2, queries=2, tokens=33)
SHAPE = {
    "heads": CASE.heads, "kv_heads": CASE.kv_heads, "head_dim": CASE.head_dim, "batch": CASE.batch,
    "queries": CASE.queries, "dtype": CASE.dtype, "device": "cuda",
}  # fmt: skip
LIBRARY = ("nccl_allreduce", "nccl_allreduce:calls=3")


class Damaged(NcclOverMpi):
    """The last rank receives one wrong bit."""

    def group_end(self):
        into = [array for start, array, _ in self._posts if start == self._comm.Irecv]
        super().group_end()
        if into and self.rank == self.size - 1:
            self._runtime.queue(lambda: into[0].reshape(-1).view(np.uint32).__ixor__(1))

    def all_reduce(self, array, operation):
        super().all_reduce(array, operation)
        if operation == "sum":
            self._runtime.queue(lambda: array.__imul__(2))


def stand_in(damaged):
    """One emulated GPU for all ranks, and NCCL made of MPI."""
    runtime = EmulatorRuntime()
    cupy_runtime.current = lambda: runtime
    cupy_runtime.choose = lambda index: None
    nccl.problem = lambda: None
    nccl.version = lambda: (2, 30)
    nccl.connect = Damaged if damaged else NcclOverMpi


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


def over_nccl(device, given, scheme):
    """Three steps and a captured one."""
    output = "heads" if select(scheme).row.scattered else "replicated"
    with treeattn.Decoder(WORLD, **SHAPE, scheme=scheme, transport="nccl", output=output) as decoder:
        found = [results(device, decoder, lambda: decoder(*given)) for _ in range(3)]
        found.append(results(device, decoder, decoder.capture(*given)))
    return found


def check_schedule(device, given, scheme):
    output = "heads" if select(scheme).row.scattered else "replicated"
    with treeattn.Decoder(WORLD, **SHAPE, scheme=scheme, transport="host", output=output) as staged:
        wanted = results(device, staged, lambda: staged(*given))
    for found in over_nccl(device, given, scheme):
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(got, want)
    if output == "replicated":
        CASE.check(*wanted, tensor_cores=False)


def check_library(device, given, scheme):
    steps = over_nccl(device, given, scheme)
    digests = [hashlib.sha256(out.tobytes() + lse.tobytes()).hexdigest() for out, lse in steps]
    if len(set(map(tuple, WORLD.allgather(digests)))) > 1 and WORLD.rank == 0:
        print(f"{scheme}: ranks ended with different bits, which NCCL does not promise to be equal")
    for found in steps:
        CASE.check(*found, tensor_cores=False)


def failures():
    """Scheme -> what is wrong with it on this rank."""
    cupy_runtime.choose(comm_.node_local_rank(WORLD))
    device = devices.find("cuda")
    given, wrong = inputs(device), {}
    checks = dict.fromkeys(collectives.names("schedule"), check_schedule) | dict.fromkeys(
        LIBRARY, check_library
    )
    for scheme, check in checks.items():
        try:
            check(device, given, scheme)
        except AssertionError as error:  # others end the job
            wrong[scheme] = str(error).strip().partition("\n")[0] or "beyond its bounds"
    return wrong


def main():
    if "--stand-ins" in sys.argv:
        stand_in("--damaged" in sys.argv)
    everyone = WORLD.allgather(failures())
    if WORLD.rank == 0:
        for rank, wrong in enumerate(everyone):
            for scheme, why in wrong.items():
                print(f"rank {rank}: {scheme}: {why}")
        print(f"{len(collectives.names('schedule')) + len(LIBRARY)} schemes over {WORLD.size} ranks")
    sys.exit(int(any(everyone)))


if __name__ == "__main__":
    main()
