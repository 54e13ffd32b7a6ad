"""Jobs on stand-ins of GPUs: what `tests/gpu/test_ranks.py` asks of GPUs can fail, and how jobs end."""

import re

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


# Two ranks on one emulated GPU, a decoder over NCCL that has made a step as it is and one as a graph.
BEGIN = """
import sys, time
sys.path[:0] = [".", "tests", "tests/gpu"]
import over_ranks
import treeattn
from over_ranks import WORLD, devices
over_ranks.stand_in()
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

# A prompt that is dealt out, whose blocks travel by NCCL: what waits for them is torch.
PROMPT = """
import time
import pytest
from tests.support import cuda_tensors, fake_nccl, nccl, tiny_models
from treeattn import huggingface
from treeattn.mpi import communicators
def fail(*_):
    raise ZeroDivisionError
comm, model = communicators.world(), tiny_models.wide("Llama", "treeattn", num_hidden_layers=2)
cache = huggingface.ShardedKV(model.config, comm, capacity=64)
if comm.rank == 1:
    model.model.layers[1].register_forward_pre_hook(fail)
fake_nccl.connected_by(pytest.MonkeyPatch(), nccl.NcclOverMpi)
with cuda_tensors.models_on_gpu(comm.rank):
    try:
        huggingface.prefill(model, tiny_models.prompt(), cache)
    except ZeroDivisionError:
        time.sleep(300)
"""


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


def test_a_rank_that_fails_within_a_prompt():
    pytest.importorskip("transformers", reason="not installed (the extra `huggingface`)")
    settings = {"OMP_NUM_THREADS": "1", "TREEATTN_TIMEOUT": "3"}
    done = run("-m", "mpi4py", "-c", PROMPT, ranks=2, code=124, **settings)
    says = "treeattn: rank 0: a step of the model, queued to a GPU: 3 s without the other ranks"
    assert says in done.stderr
