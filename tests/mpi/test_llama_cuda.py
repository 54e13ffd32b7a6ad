"""Llamas on emulated GPUs: Hugging Face's logits and the CPU's tokens, on three ranks.

The emulator takes its time: one model with sharded weights, another one in tests/command/test_cuda.py, and
one with whole ones; that the others' numbers matter is shown on the CPU.
"""

from unittest import mock

import pytest
from mpi4py import MPI

from tests.emulator.runtime import StrictRuntime
from tests.support.models import GOLDEN, PROMPT, assert_logits
from treeattn import Reduction
from treeattn.errors import ArgumentError, BackendError
from treeattn.llama import Llama, Session

pytestmark = [
    pytest.mark.usefixtures("runtime"),
    pytest.mark.skipif(MPI.COMM_WORLD.size != 3, reason="models on emulated GPUs run on three ranks"),
]
RUNTIME = StrictRuntime


@pytest.mark.slow
def test_logits_and_tokens_are_hugging_faces(comm, written):
    model = Llama(written("biases"), comm, device="cuda")
    wanted, tokens = GOLDEN["biases.logits"][:3], GOLDEN["biases.tokens"]
    given = {"capacity": len(PROMPT) + len(wanted), "scheme": Reduction("head_scatter", "host")}
    with Session(comm, model, PROMPT, **given) as session:
        logits = session.prefill()
        for row, token in zip(wanted, tokens, strict=False):
            assert_logits(logits, row)
            assert session.choose(logits) == token
            logits = session.step(int(token))


@pytest.mark.parametrize("scheme", ["recursive_doubling", "nccl_allreduce"])
def test_records_travel_over_nccl(comm, written, nccl_communicators, scheme):
    directory = written("tied")
    given = {"capacity": 14, "scheme": Reduction(scheme, "nccl")}
    with Session(comm, Llama(directory, device="cuda"), PROMPT[:10], **given) as session:
        token = session.choose(session.prefill())
        logits = [session.step(token) for _ in range(3)]
    with Session(comm, Llama(directory), PROMPT[:10], capacity=14) as session:
        assert session.choose(session.prefill()) == token
        for row in logits:
            assert_logits(row, session.step(token))
    assert nccl_communicators


def test_ranks_have_one_kind_of_device(comm, several, written):
    directory = written("tied")
    with pytest.raises(ArgumentError, match="the model's device differs between ranks: 'cpu' on rank 0"):
        Llama(directory, comm, device="cuda" if comm.rank else "cpu")


def test_memory_of_a_gpu_that_is_out_on_one_rank_is_told_by_all(comm, written, runtime):
    model = Llama(written("tied"), device="cuda")
    with Session(comm, model, PROMPT[:8], capacity=9, scheme=Reduction(transport="host")) as session:
        if comm.rank == comm.size - 1:
            runtime.empty = mock.Mock(side_effect=BackendError("out of GPU memory"))
        with pytest.raises(BackendError, match="out of GPU memory"):
            session.prefill()
