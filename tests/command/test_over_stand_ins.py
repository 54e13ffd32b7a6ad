"""What `tests/gpu/test_ranks.py` asks of GPUs, asked of their stand-ins: the questions can fail."""

import pytest

from tests.emulator.raw_module import compiler_problem
from tests.support.drawn import FACTOR
from treeattn import collectives

from .launch import run

pytestmark = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))
MOST = len(collectives.names("schedule"))
BY_NCCL, BY_PEERS = min(5 * FACTOR, MOST), min(3 * FACTOR, MOST)
NCCL = ("-m", "mpi4py", "tests/gpu/over_ranks.py", "nccl", "--stand-ins", "--drawn", BY_NCCL)
PEERS = ("-m", "mpi4py", "tests/gpu/over_ranks.py", "peer", "--stand-ins", "--drawn", BY_PEERS)
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


@pytest.mark.parametrize(
    ("program", "ranks", "says"),
    [
        (NCCL, 2, f"{BY_NCCL + 2} schemes over 2 ranks"),
        pytest.param(NCCL, 5, f"{BY_NCCL + 2} schemes over 5 ranks", marks=pytest.mark.deep),
        pytest.param(PEERS, 2, f"{BY_PEERS} schemes over 2 ranks", marks=pytest.mark.deep),
        ((*PEERS, "--two-nodes"), 4, f"{BY_PEERS} schemes over 4 ranks"),
    ],
)
def test_schedules_of_gpus(program, ranks, says):
    assert run(*program, ranks=ranks, **SHARED).stdout.splitlines() == [says]


def test_one_wrong_bit_in_a_message_is_found():
    done = run(*NCCL, "--damaged", ranks=2, **SHARED, code=1)
    wrong = {line.split(": ")[1] for line in done.stdout.splitlines() if line.startswith("rank ")}
    assert wrong >= {"nccl_allreduce", "nccl_allreduce:calls=3"}
    assert len(wrong) == BY_NCCL + 2


def test_without_the_variable_the_first_rank_says_so():
    done = run(*NCCL, ranks=2, NCCL_MULTI_RANK_GPU_ENABLE="0", code=1)
    assert "share GPU emulated GPU 0 of" in done.stderr
    assert "only where NCCL_MULTI_RANK_GPU_ENABLE=1 is set for every rank" in done.stderr
