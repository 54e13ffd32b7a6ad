"""One rank of a node in a process of its own, for `test_peer.py`.

Usage: python peer_process.py RANK SIZE FOLDER FAULT. Windows are files in FOLDER, which other ranks map to
read. FAULT: "none", "dies" (the last rank, at its second step) or one of faults.py, planted into the last
rank. Prints how the steps went.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.emulator.faults import FAULTS, planted
from tests.emulator.runtime import EmulatorRuntime
from treeattn import collectives, partial
from treeattn.backends import cpu, cuda
from treeattn.collectives import program as ir
from treeattn.collectives.check import prove
from treeattn.collectives.executors import loopback

RECORDS, HEAD_DIM, STEPS = 5, 8, 4
SECONDS = 2.0  # that a rank is waited for


def exchanged(folder: Path, rank: int, size: int, handle: bytes) -> list[bytes]:
    """The handles of all ranks."""
    unfinished = folder / f"unfinished-{rank}"
    unfinished.write_bytes(handle)
    unfinished.replace(folder / f"handle-{rank}")
    files = [folder / f"handle-{other}" for other in range(size)]
    while not all(file.exists() for file in files):
        time.sleep(0.001)
    return [file.read_bytes() for file in files]


def main() -> None:
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    folder, fault = Path(sys.argv[3]), sys.argv[4]
    mine = fault if rank == size - 1 else "none"
    runtime = EmulatorRuntime(seed=rank, edit=planted(FAULTS[mine]) if mine in FAULTS else str)
    runtime.shared_folder = str(folder)
    schedule = collectives.build("all_gather_merge", size)
    program = ir.plan(schedule, prove(schedule), rank, RECORDS, node=range(size))
    operator = cuda.MergeOperator(HEAD_DIM, runtime=runtime)
    runtime.kernel("pull_partials", "pull_partials<InParameters>")  # compiled before anyone waits
    handle = runtime.expose(operator.window_bytes(program))[1]
    handles = exchanged(folder, rank, size, handle)
    windows = [runtime.open_exposed(handle) for handle in handles]
    buffer = np.zeros((RECORDS, HEAD_DIM + partial.EXTRA), np.float32)
    pull = operator.planned_gets(buffer, program, windows, SECONDS, operator.resident_blocks(RECORDS))
    steps = np.random.default_rng(0).standard_normal((STEPS, size, *buffer.shape)).astype(np.float32)
    for number, partials in enumerate(steps):
        if mine == "dies" and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        buffer[...] = partials[rank]
        pull()
        if pull.timed_out_peer() is not None:
            print("step {}: rank {} is late in round {}".format(number + 1, *pull.timed_out_peer()))
            assert np.isnan(buffer).all()
            return
        want = loopback.run(schedule, list(partials), cpu.MergeOperator(HEAD_DIM))[rank]
        np.testing.assert_array_equal(buffer.view(np.uint32), want.view(np.uint32))
    print("same bits")


if __name__ == "__main__":
    main()
