"""Weights by heads and the cache by tokens, over the same ranks."""

from __future__ import annotations

import os
import socket

import pytest

pytest.importorskip("transformers", reason="not installed (the extra `huggingface`)")
torch = pytest.importorskip("torch", reason="not installed (the extra `huggingface`)")

from tests.support.sharded_models import check_tensor_parallel  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def group():
    """torch's own ranks, of the same job, for transformers' tensor parallel layers."""
    if torch.distributed.is_initialized():
        yield
        return
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = world.bcast(free.getsockname()[1])
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": str(world.rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.distributed.init_process_group("gloo")
    yield
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("family", "scheme"), [("Llama", None), ("Qwen3", "binary_tree")])
def test_each_rank_has_its_heads_of_the_weights_and_its_tokens_of_the_cache(comm, tmp_path, family, scheme):
    if comm.size != 2:
        pytest.skip("the models have two heads of keys")
    check_tensor_parallel(comm, family, comm.bcast(str(tmp_path)), scheme)
