"""What ranks that read one another's memory must do: run by every rank, on GPUs or on stand-ins.

    mpiexec -n 4 python -m mpi4py tests/gpu/over_peers.py [--stand-ins]

Every schedule over ``transport="peer"`` has the bits of ``transport="host"``, step after step and captured.
Ranks may share a GPU, whose time they then share too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import over_ranks

from treeattn import collectives

STEPS = 20


def check(device, given, scheme):
    """Raises `AssertionError` where a step has other bits than by way of the host."""
    wanted = over_ranks.by_the_host(device, given, scheme)
    with over_ranks.planned(scheme, "peer") as decoder:
        captured = decoder.capture(*given)
        for number in range(STEPS):
            step = captured if number % 2 else lambda: decoder(*given)
            found = over_ranks.results(device, decoder, step)
            for got, want in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(got, want)


if __name__ == "__main__":
    if "--stand-ins" in sys.argv:
        over_ranks.stand_in()
    over_ranks.run(dict.fromkeys(collectives.names("schedule"), check))
