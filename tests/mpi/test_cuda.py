"""device="cuda" over real ranks: every rank has an emulated GPU, whose arrays are NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

import treeattn
from tests.emulator.cases import Case
from tests.emulator.raw_module import compiler_problem
from tests.emulator.runtime import EmulatorRuntime
from tests.support.ranks import assert_same_bits
from treeattn import collectives
from treeattn.backends import cpu
from treeattn.backends.cuda import cupy_runtime
from treeattn.backends.cuda.device import Cuda
from treeattn.collectives.runtime import nccl
from treeattn.mpi import communicators, library
from treeattn.shards import parse_layout

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem())),
]

CUDA_MPI = {"transport": "cuda-mpi"}
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


def by_way_of_the_host(comm, arrays, case=CASE, **planned):
    """(out, lse) as the host's transport gives them, and what it sends."""
    how = treeattn.Reduction(**planned, transport="host")
    with treeattn.Decoder(comm, **case.plan, scheme=how) as staged:
        return [array.copy() for array in staged(*arrays)], staged.sent


def assert_equal(results, wanted):
    for got, want in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("scheme", [*REPLICATED, "mpi_allreduce"])
def test_staged_through_the_host(comm, runtime, scheme):
    """Attention and finish on the GPU, the merges on the processor: they have the same bits."""
    q, k, v = shard(comm)
    with treeattn.Decoder(comm, **CASE.plan, scheme=treeattn.Reduction(scheme, transport="host")) as decoder:
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
        treeattn.Decoder(comm, **CASE.plan, scheme=treeattn.Reduction(transport="host"))
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(cupy_runtime, "current", full)
    with pytest.raises(treeattn.BackendError, match="out of GPU memory"):
        treeattn.decode(*shard(comm), comm=comm, device="cuda", scheme=treeattn.Reduction(transport="host"))


def test_trouble_with_the_query_of_one_rank_is_told_by_all(comm, runtime, monkeypatch):
    """Where it is read, by an error that is not ours, and where it arrives."""
    q, k, v = shard(comm)
    given = {"comm": comm, "device": "cuda", "scheme": treeattn.Reduction(transport="host"), "q_root": 0}

    def broken(*_):
        raise RuntimeError("cudaErrorIllegalAddress")

    with monkeypatch.context() as patch:
        if comm.rank == 0:
            patch.setattr(Cuda, "to_host", broken)
        with pytest.raises(treeattn.TreeattnError, match="RuntimeError: cudaErrorIllegalAddress"):
            treeattn.decode(q, k, v, **given)
    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(Cuda, "from_host", broken)
        with pytest.raises(treeattn.TreeattnError, match="RuntimeError: cudaErrorIllegalAddress"):
            treeattn.decode(q, k, v, **given)


def test_a_transport_is_chosen_never_guessed(comm, runtime):
    if comm.size == 1:
        return
    with pytest.raises(treeattn.TransportError, match="'nccl'.*'cuda-mpi'.*'host'"):
        treeattn.decode(*shard(comm), comm=comm, device="cuda")
    mine = "host" if comm.rank else "nccl"
    with pytest.raises(treeattn.ArgumentError, match="transport differs"):
        treeattn.decode(*shard(comm), comm=comm, device="cuda", scheme=treeattn.Reduction(transport=mine))


@pytest.mark.parametrize("scheme", REPLICATED)
def test_nccl_gives_the_bits_of_the_cpu(comm, runtime, nccl_communicators, scheme):
    """Through a step as it is, a captured reduction and a launched one."""
    arrays = shard(comm)
    wanted, _ = by_way_of_the_host(comm, arrays, scheme=scheme)
    with treeattn.Decoder(comm, **CASE.plan, scheme=treeattn.Reduction(scheme, transport="nccl")) as decoder:
        for _ in range(3):
            assert_equal(decoder(*arrays), wanted)
        assert decoder.transport == "nccl"
    assert runtime.graph_launches == (2 if comm.size > 1 else 0)
    assert [communicator.ended for communicator in nccl_communicators] == ["closed"]


@pytest.mark.parametrize("scheme", ["nccl_allreduce", "nccl_allreduce:calls=3"])
def test_nccl_allreduce_is_exact(comm, runtime, nccl_communicators, scheme):
    """Sums in the library's order; ranks without tokens add nothing."""
    for tokens in (33, 1, 0):
        case = Case("float32", 64, group=2, batch=2, tokens=tokens)
        with treeattn.Decoder(comm, **case.plan, scheme=scheme) as decoder:
            for _ in range(3):
                case.check(*decoder(*shard(comm, case)), tensor_cores=False)
            assert decoder.transport == "nccl"
            assert decoder.certificate is None
    assert runtime.graph_launches == 6


def test_nan_and_hostile_scores_through_nccl_allreduce(comm, runtime, nccl_communicators):
    case = Case("float32", 64, tokens=40, scores=1e4)
    q, k, v = shard(comm, case)
    with treeattn.Decoder(comm, **case.plan, scheme="nccl_allreduce") as decoder:
        case.check(*decoder(q, k, v), tensor_cores=False)
        if comm.rank == comm.size - 1:
            k[0, 0, 1, 3] = np.nan
        out, lse = decoder(q, k, v)
    assert np.isnan(out[:, :, 1]).all()
    assert np.isnan(lse[:, 1]).all()
    assert np.isfinite(out[:, :, 0]).all()


@pytest.mark.parametrize("scheme", ["recursive_doubling", "nccl_allreduce", "ring"])
def test_a_captured_step_is_one_launch(comm, runtime, nccl_communicators, scheme):
    case = Case("float32", 64, group=2, tokens=33)
    q, k, v = shard(comm, case)
    lengths = np.zeros(1, np.int64)
    with treeattn.Decoder(comm, **case.plan, scheme=treeattn.Reduction(scheme, transport="nccl")) as decoder:
        step = decoder.capture(q, k, v, lengths)
        launches = runtime.graph_launches
        for fraction in (1, 2):  # a growing cache
            lengths[0] = k.shape[1] * fraction // 2
            captured = [array.copy() for array in step()]
            assert runtime.graph_launches == launches + fraction
            assert_same_bits(comm, *captured)
        case.check(*captured, tensor_cores=False)
        with pytest.raises(treeattn.ArgumentError, match="int64 device array"):
            decoder.capture(q, k, v, [1] if comm.rank == comm.size - 1 else lengths)
    with pytest.raises(treeattn.StateError, match="closed"):
        step()


def test_what_cannot_be_captured_is_refused(comm, runtime):
    q, k, v = shard(comm)
    with (
        treeattn.Decoder(comm, **CASE.plan, scheme=treeattn.Reduction(transport="host")) as decoder,
        pytest.raises(treeattn.TransportError, match="'nccl'"),
    ):
        decoder.capture(q, k, v)
    with (
        treeattn.Decoder(comm, **{**CASE.plan, "device": "cpu"}) as decoder,
        pytest.raises(treeattn.BackendError, match="device='cuda'"),
    ):
        decoder.capture(q, k, v)


@pytest.mark.parametrize(
    ("version", "variable", "remedy"),
    [
        ((2, 30), None, "NCCL_MULTI_RANK_GPU_ENABLE=1 is set for every rank.*'host'"),
        ((2, 28), "1", "NCCL 2.28 needs one for each: install NCCL 2.30 or newer.*'host'"),
    ],
)
def test_ranks_on_one_gpu_are_refused_by_all(
    comm, runtime, nccl_communicators, monkeypatch, version, variable, remedy
):
    """Also where the variable is missing on one rank alone."""
    runtime.identity = "8f1c0a52"
    monkeypatch.setattr(nccl, "version", lambda: version)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", variable or ("0" if comm.rank == comm.size - 1 else "1"))
    if comm.size == 1:
        return
    with pytest.raises(treeattn.TransportError, match=rf"ranks 0, 1.* share GPU 8f1c0a52 of .*{remedy}"):
        treeattn.Decoder(comm, **CASE.plan, scheme=treeattn.Reduction(transport="nccl"))
    assert not nccl_communicators


def test_other_versions_of_nccl_are_told_before_they_meet(comm, runtime, nccl_communicators, monkeypatch):
    if comm.size == 1:
        return
    monkeypatch.setattr(nccl, "version", lambda: (2, 30 + comm.rank))
    with pytest.raises(treeattn.ArgumentError, match="the version of NCCL differs between ranks"):
        treeattn.Decoder(comm, **CASE.plan, scheme=treeattn.Reduction(transport="nccl"))
    assert not nccl_communicators


def test_nccl_that_lacks_on_one_rank_is_refused_by_all(comm, runtime, monkeypatch):
    monkeypatch.setattr(nccl, "version", lambda: (2, 30))
    monkeypatch.setattr(nccl, "problem", lambda: "no NCCL" if comm.rank == comm.size - 1 else None)
    with pytest.raises(treeattn.TransportError, match="no NCCL"):
        treeattn.Decoder(comm, **CASE.plan, scheme=treeattn.Reduction(transport="nccl"))


@pytest.mark.parametrize("transport", ["nccl", "cuda-mpi"])
def test_no_room_for_messages_on_one_rank_is_told_by_all(
    comm, runtime, nccl_communicators, monkeypatch, transport
):
    """What is allocated while the reduction is planned, after NCCL has connected."""
    monkeypatch.setattr(library, "cuda_aware", lambda: True)
    if comm.size == 1:
        return
    sizes = []

    def full(shape, dtype):
        sizes.append(shape)
        if len(sizes) > 3 and comm.rank == 0:  # records, out and lse fit
            raise treeattn.BackendError("out of GPU memory")
        return np.empty(shape, dtype)

    monkeypatch.setattr(runtime, "empty", full)
    with pytest.raises(treeattn.BackendError, match="rank 0: out of GPU memory"):
        treeattn.Decoder(
            comm, **CASE.plan, scheme=treeattn.Reduction("recursive_doubling", transport=transport)
        )
    assert [communicator.ended for communicator in nccl_communicators] == ["aborted"] * (transport == "nccl")


def test_no_compiled_operator_on_one_rank_is_told_by_all(comm, runtime, monkeypatch):
    def none(*_):
        raise treeattn.BackendError("no C compiler")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(cpu.MergeOperator, "mpi_function", none)
    with pytest.raises(treeattn.BackendError, match="no C compiler"):
        treeattn.Decoder(comm, **CASE.plan, scheme=treeattn.Reduction("mpi_allreduce", transport="host"))


@pytest.mark.parametrize("scheme", SCHEDULES)
def test_cuda_aware_mpi(comm, runtime, monkeypatch, scheme):
    """The stream is waited for before every round, and nothing else is done by the host."""
    arrays = shard(comm)
    planned = {"scheme": scheme, "output": "replicated" if scheme in REPLICATED else "heads"}
    over_mpi, how = (treeattn.Reduction(**planned, **way) for way in ({"executor": "mpi"}, CUDA_MPI))
    with treeattn.Decoder(comm, **CASE.plan | {"device": "cpu"}, scheme=over_mpi) as on_cpu:
        rounds = len(on_cpu._reducer.rounds)
    monkeypatch.setattr(library, "cuda_aware", lambda: False)
    with pytest.raises(treeattn.TransportError, match="'nccl' or 'host'"):
        treeattn.Decoder(comm, **CASE.plan, scheme=how)
    monkeypatch.setattr(library, "cuda_aware", lambda: True)
    wanted, _ = by_way_of_the_host(comm, arrays, **planned)
    waits = []
    monkeypatch.setattr(runtime, "synchronize", lambda: waits.append(1))
    with treeattn.Decoder(comm, **CASE.plan, scheme=how) as decoder:
        assert_equal(decoder(*arrays), wanted)
        assert len(waits) == rounds


def test_ranks_of_a_node_count_from_zero(comm):
    local = comm.allgather(communicators.node_local_rank(comm))
    for node in communicators.node_groups(comm):
        assert [local[rank] for rank in node] == list(range(len(node)))
