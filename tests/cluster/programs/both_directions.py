"""Ranks 1 and 2 send to rank 0 at once, then rank 0 to both: rank 0 prints the seconds of each, as JSON."""

import json
import time

import numpy as np
from mpi4py import MPI

SIZE = 1 << 20

world = MPI.COMM_WORLD
data = np.zeros((2, SIZE), np.uint8)


def everything_arrives(source: list[int], target: list[int]) -> float:
    """Seconds until all messages have been received, by rank 0's clock."""
    world.Barrier()
    began = time.monotonic()
    requests = []
    if world.rank in source:
        requests = [world.Isend(data[0], other) for other in target]
    if world.rank in target:
        requests = [world.Irecv(data[row], other) for row, other in enumerate(source)]
    MPI.Request.Waitall(requests)
    world.Barrier()
    return time.monotonic() - began


seconds = {"in": everything_arrives([1, 2], [0]), "out": everything_arrives([0], [1, 2])}
if world.rank == 0:
    print(json.dumps({"payload": 2 * SIZE, **seconds}), flush=True)
