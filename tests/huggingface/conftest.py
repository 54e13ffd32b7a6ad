"""Tests inside a job of MPI, as those of tests/mpi, or inside one of torchrun, and then without MPI:

mpiexec -n N python -m mpi4py -m pytest --with-mpi -x tests/huggingface
torchrun --standalone --nproc-per-node N -m pytest -p no:pytest_mpi -x tests/huggingface

Apart from those of tests/mpi, since every rank imports torch.
"""

import importlib.util
import os
import socket

import pytest

if "TORCHELASTIC_RUN_ID" in os.environ:
    from tests.support.torch_job import *  # noqa: F403
else:
    from tests.mpi.conftest import *  # noqa: F403

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_[!e]*"] if MISSING else []  # test_extra.py needs neither


def pytest_terminal_summary(terminalreporter):
    if MISSING:
        terminalreporter.line(f"left out: {', '.join(MISSING)} not installed (the extra `huggingface`)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "huggingface":
            item.add_marker(pytest.mark.mpi)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture
def gpu(comm):
    """The emulated GPU of this rank, on which models come to lie."""
    from tests.support.cuda_tensors import models_on_gpu

    with models_on_gpu(comm.rank) as runtime:
        yield runtime


@pytest.fixture
def folder(comm, tmp_path):
    """One for all ranks."""
    return comm.bcast(str(tmp_path))


@pytest.fixture(scope="module")
def group():
    """torch's own ranks, of the same job, for transformers' tensor parallel layers."""
    from torch import distributed

    if distributed.is_initialized():
        yield
        return
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = world.bcast(free.getsockname()[1])
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": str(world.rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    distributed.init_process_group("gloo")
    yield
    distributed.barrier()
    distributed.destroy_process_group()
