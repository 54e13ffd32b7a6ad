"""device="cuda" over real ranks: every rank has an emulated GPU, whose arrays are NumPy's."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

import treeattn
from tests.emulator.cases import Case
from tests.emulator.raw_module import compiler_problem
from tests.emulator.runtime import EmulatorRuntime
from treeattn import collectives
from treeattn.backends import cupy_runtime
from treeattn.shards import parse_layout

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem())),
]

CASE = Case("float32", 64, group=2, batch=2, queries=2, tokens=33)
SCHEDULES = collectives.names("schedule")
REPLICATED = [name for name in SCHEDULES if collectives.build(name, 4).result == "replicated"]


@pytest.fixture
def runtime(comm, monkeypatch):
    """What device="cuda" finds on this rank."""
    emulator = EmulatorRuntime()
    emulator.identity = f"emulated GPU {comm.rank}"
    monkeypatch.setattr(cupy_runtime, "current", lambda: emulator)
    return emulator


def shard(comm, case=CASE):
    """q and this rank's part of k and v."""
    q, k, v, _, _ = case.inputs()
    (run,) = parse_layout("contiguous").runs(case.tokens, comm.rank, comm.size)
    return q, np.ascontiguousarray(k[:, run]), np.ascontiguousarray(v[:, run])


def assert_same_bits(comm, *arrays):
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    assert comm.allgather(digest) == [digest] * comm.size


def options(case=CASE):
    """Of a `Decoder`."""
    return {
        "heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.head_dim, "batch": case.batch,
        "queries": case.queries, "dtype": case.dtype, "device": "cuda",
    }  # fmt: skip


@pytest.mark.parametrize("scheme", [*REPLICATED, "mpi_allreduce"])
def test_staged_through_the_host(comm, runtime, scheme):
    """Attention and finish on the GPU, the merges on the processor: they have the same bits."""
    q, k, v = shard(comm)
    with treeattn.Decoder(comm, **options(), scheme=scheme, transport="host") as decoder:
        for _ in range(2):
            out, lse = decoder(q, k, v)
            CASE.check(out, lse, tensor_cores=False)
            assert_same_bits(comm, out, lse)
        assert (decoder.certificate is None) == (scheme == "mpi_allreduce")


def test_ranks_share_what_is_wrong(comm, runtime, monkeypatch):
    """One rank without memory, or without a GPU: every rank raises the same."""

    def full(*_):
        raise treeattn.BackendError("out of GPU memory")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(runtime, "empty", full)
    with pytest.raises(treeattn.BackendError, match="out of GPU memory"):
        treeattn.Decoder(comm, **options(), transport="host")
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(cupy_runtime, "current", full)
    with pytest.raises(treeattn.BackendError, match="out of GPU memory"):
        treeattn.decode(*shard(comm), comm=comm, device="cuda", transport="host")


def test_a_transport_is_chosen_never_guessed(comm, runtime):
    if comm.size == 1:
        return
    with pytest.raises(treeattn.TransportError, match="'nccl'.*'cuda-mpi'.*'host'"):
        treeattn.decode(*shard(comm), comm=comm, device="cuda")
    mine = "host" if comm.rank else "nccl"
    with pytest.raises(treeattn.ArgumentError, match="transport differs"):
        treeattn.decode(*shard(comm), comm=comm, device="cuda", transport=mine)
