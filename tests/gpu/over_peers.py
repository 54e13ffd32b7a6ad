"""What ranks that read one another's memory must do: run by every rank, on GPUs or on stand-ins.

    mpiexec -n 4 python -m mpi4py tests/gpu/over_peers.py [--stand-ins]

Every schedule over ``transport="peer"`` has the bits of ``transport="host"``, step after step and captured.
Ranks may share a GPU, whose time they then share too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from emulator.cases import Case  # noqa: E402
from emulator.runtime import EmulatorRuntime  # noqa: E402
from mpi4py import MPI  # noqa: E402

import treeattn  # noqa: E402
from treeattn import collectives  # noqa: E402
from treeattn import comm as comm_  # noqa: E402
from treeattn.backends.cuda import cupy_runtime  # noqa: E402
from treeattn.decoder import device as devices  # noqa: E402
from treeattn.decoder.plan import select  # noqa: E402
from treeattn.shards import parse_layout  # noqa: E402

WORLD = MPI.COMM_WORLD
CASE = Case("float32", 64, group=2, batch=2, queries=2, tokens=33)
SHAPE = {
    "heads": CASE.heads, "kv_heads": CASE.kv_heads, "head_dim": CASE.head_dim, "batch": CASE.batch,
    "queries": CASE.queries, "dtype": CASE.dtype, "device": "cuda",
}  # fmt: skip
STEPS = 20


def results(device, decoder, step):
    """out and lse of one step, on the host."""
    arrays = step()
    decoder.synchronize()
    return [device.to_host(array) for array in arrays]


def check(device, given, scheme):
    """Raises `AssertionError` where a step has other bits than by way of the host."""
    output = "heads" if select(scheme).row.scattered else "replicated"
    planned = {**SHAPE, "scheme": scheme, "output": output}
    with treeattn.Decoder(WORLD, **planned, transport="host") as staged:
        wanted = results(device, staged, lambda: staged(*given))
    with treeattn.Decoder(WORLD, **planned, transport="peer") as decoder:
        captured = decoder.capture(*given)
        for number in range(STEPS):
            step = captured if number % 2 else lambda: decoder(*given)
            for got, want in zip(results(device, decoder, step), wanted, strict=True):
                np.testing.assert_array_equal(got, want)


def failures():
    """Scheme -> what is wrong with it on this rank."""
    cupy_runtime.choose(comm_.node_local_rank(WORLD))
    device, wrong = devices.find("cuda"), {}
    q, k, v, _, _ = CASE.inputs()
    (run,) = parse_layout("contiguous").runs(CASE.tokens, WORLD.rank, WORLD.size)
    given = [device.from_host(np.ascontiguousarray(array)) for array in (q, k[:, run], v[:, run])]
    for scheme in collectives.names("schedule"):
        try:
            check(device, given, scheme)
        except AssertionError as error:  # others end the job
            wrong[scheme] = str(error).strip().partition("\n")[0]
    return wrong


def main():
    if "--stand-ins" in sys.argv:
        runtime = EmulatorRuntime()
        cupy_runtime.current = lambda: runtime
        cupy_runtime.choose = lambda index: None
    everyone = WORLD.allgather(failures())
    if WORLD.rank == 0:
        for rank, wrong in enumerate(everyone):
            for scheme, why in wrong.items():
                print(f"rank {rank}: {scheme}: {why}")
        print(f"{len(collectives.names('schedule'))} schemes over {WORLD.size} ranks")
    sys.exit(int(any(everyone)))


main()
