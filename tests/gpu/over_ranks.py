"""What over_nccl and over_peers share, which every rank of a job runs on GPUs or on stand-ins for them."""

import random
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mpi4py import MPI  # noqa: E402

import treeattn  # noqa: E402
from tests.emulator.cases import Case  # noqa: E402
from tests.emulator.runtime import EmulatorRuntime  # noqa: E402
from treeattn.backends import device as devices  # noqa: E402
from treeattn.backends.cuda import cupy_runtime  # noqa: E402
from treeattn.mpi import communicators  # noqa: E402
from treeattn.selection import select  # noqa: E402
from treeattn.shards import parse_layout  # noqa: E402

WORLD = MPI.COMM_WORLD
CASE = Case("float32", 64, group=2, batch=2, queries=2, tokens=33)


def stand_in():
    """One emulated GPU for all ranks."""
    runtime = EmulatorRuntime()
    cupy_runtime.current = lambda: runtime
    cupy_runtime.choose = lambda index: None


def planned(scheme, transport):
    """A decoder of `CASE`."""
    output = "heads" if select(scheme).row.scattered else "replicated"
    return treeattn.Decoder(
        WORLD, heads=CASE.heads, kv_heads=CASE.kv_heads, head_dim=CASE.head_dim, batch=CASE.batch,
        queries=CASE.queries, dtype=CASE.dtype, device="cuda",
        scheme=treeattn.Reduction(scheme, transport=transport, output=output),
    )  # fmt: skip


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


def drawn(schemes):
    """All of them, or so many drawn ones as stands behind --drawn."""
    if "--drawn" not in sys.argv:
        return schemes
    return random.Random(0).sample(schemes, int(sys.argv[sys.argv.index("--drawn") + 1]))


def run(checks):
    """Every check (scheme -> called with device, inputs and scheme); exits with 1 if one failed."""
    cupy_runtime.choose(communicators.node_local_rank(WORLD))
    device, wrong = devices.find("cuda"), {}
    given = inputs(device)
    for scheme, check in checks.items():
        try:
            check(device, given, scheme)
        except AssertionError as error:  # others end the job
            wrong[scheme] = str(error).strip().partition("\n")[0] or "beyond its bounds"
    everyone = WORLD.allgather(wrong)
    if WORLD.rank == 0:
        for rank, found in enumerate(everyone):
            for scheme, why in found.items():
                print(f"rank {rank}: {scheme}: {why}")
        print(f"{len(checks)} schemes over {WORLD.size} ranks")
    sys.exit(int(any(everyone)))
