"""What ranks that read one another's memory must do: run by every rank, on GPUs or on stand-ins.

    mpiexec -n 4 python -m mpi4py tests/gpu/over_peers.py [--two-nodes] [--stand-ins] [--drawn N]

Every schedule over ``transport="peer"`` has the bits of ``transport="host"``, step after step and captured.
Ranks may share a GPU, whose time they then share too. With --two-nodes the halves of the ranks are taken for
nodes, between which NCCL sends, wherever they run.
"""

import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import over_nccl
import over_ranks

from treeattn import collectives
from treeattn.mpi import communicators

STEPS = 20


def on_two_nodes():
    """The first half of the ranks on one, and so on."""
    ranks = tuple(range(over_ranks.WORLD.size))
    communicators.node_groups = lambda comm: (ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :])


def check(device, given, scheme):
    """Raises `AssertionError` where a step has other bits than by way of the host."""
    wanted = over_ranks.by_the_host(device, given, scheme)
    with over_ranks.planned(scheme, "peer") as decoder:
        nodes = communicators.node_groups(over_ranks.WORLD)
        assert decoder.executor == ("peer" if len(nodes) == 1 else "peer_nccl")
        captured = decoder.capture(*given)
        for number in range(STEPS):
            step = captured if number % 2 else lambda: decoder(*given)
            found = over_ranks.results(device, decoder, step)
            for got, want in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(got, want)


if __name__ == "__main__":
    if "--stand-ins" in sys.argv:
        over_nccl.stand_in(damaged=False)
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # not every launcher hands it on to other nodes
    if "--two-nodes" in sys.argv:
        on_two_nodes()
    over_ranks.run(dict.fromkeys(over_ranks.drawn(collectives.names("schedule")), check))
