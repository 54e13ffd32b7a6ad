"""Rank 0 prints the namespaces of all nodes and the files that launchers keep in /tmp; then all wait."""

import glob
import json
import os
import time

from mpi4py import MPI

world = MPI.COMM_WORLD
namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "uts", "ipc", "mnt", "pid")]
everyone = world.gather(namespaces)
if world.rank == 0:
    opened = {os.readlink(link) for link in glob.glob("/proc/[0-9]*/fd/*") if os.path.islink(link)}
    files = sorted(path for path in opened if path.startswith("/tmp/hydra"))
    scratch = os.environ["TMPDIR"]
    print(
        json.dumps(
            {"namespaces": [name for rank in everyone for name in rank], "files": files, "scratch": scratch}
        ),
        flush=True,
    )
time.sleep(300)
