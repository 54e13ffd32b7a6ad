"""Rank 0 prints, as JSON, each rank's host name, the ranks of its node, and what isolates the node."""

import json
import os
import socket

from mpi4py import MPI

world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
mine = {
    "host": socket.gethostname(),
    "node_ranks": node.allgather(world.rank),
    "namespaces": {
        kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "uts", "ipc", "mnt", "pid")
    },
}
everyone = world.gather(mine)
if world.rank == 0:
    print(json.dumps(everyone), flush=True)
