"""transport="peer" over real ranks: each has an emulated GPU, and shared memory stands for CUDA IPC."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from test_cuda import REPLICATED, SCHEDULES, assert_same_bits, options, shard

import treeattn
from tests.emulator.cases import Case
from tests.emulator.raw_module import compiler_problem
from tests.emulator.runtime import EmulatorRuntime
from treeattn import collectives
from treeattn import comm as comm_
from treeattn.backends.cuda import cupy_runtime

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem())),
]


@pytest.fixture
def runtime(comm, monkeypatch):
    """What device="cuda" finds on this rank; whatever it exposed is freed by the end."""
    emulator = EmulatorRuntime(seed=comm.rank)
    monkeypatch.setattr(cupy_runtime, "current", lambda: emulator)
    emulator.kernel("pull_partials", "pull_partials")  # compiled before anyone waits
    return emulator


def results_by_way_of_the_host(comm, arrays, case=None, **planned):
    """(out, lse) as another transport gives them."""
    with treeattn.Decoder(comm, **options(*[case] * bool(case)), **planned, transport="host") as decoder:
        return [array.copy() for array in decoder(*arrays)]


@pytest.mark.parametrize("scheme", SCHEDULES)
def test_it_gives_the_bits_of_the_host(comm, runtime, scheme):
    """Step after step, in one launch each beside attention and finish, without allocating."""
    arrays = shard(comm)
    planned = {"scheme": scheme, "output": "replicated" if scheme in REPLICATED else "heads"}
    wanted = results_by_way_of_the_host(comm, arrays, **planned)
    with treeattn.Decoder(comm, **options(), **planned, transport="peer") as decoder:
        decoder(*arrays)
        launches, allocations = runtime.launches, runtime.allocations
        for _ in range(5):
            for got, want in zip(decoder(*arrays), wanted, strict=True):
                np.testing.assert_array_equal(got, want)
        assert runtime.allocations == allocations
        finishes = decoder.heads.start < decoder.heads.stop  # fewer heads than ranks
        assert runtime.launches - launches == 5 * (1 + (comm.size > 1) + finishes)
        assert decoder.transport == "peer"
        assert decoder.certificate == collectives.check(decoder.schedule)
    assert not runtime._maps


@pytest.mark.parametrize("batch", [1, 3])
def test_one_shot_and_two_shot(comm, runtime, batch):
    """A step of each counts the same messages as over MPI."""
    case = Case("float16", 64, kv_heads=8, batch=batch, tokens=33)
    arrays = shard(comm, case)
    for scheme in ("all_gather_merge", "reduce_scatter_gather"):
        wanted = results_by_way_of_the_host(comm, arrays, case, scheme=scheme)
        with (
            treeattn.Decoder(comm, **options(case), scheme=scheme, transport="host") as staged,
            treeattn.Decoder(comm, **options(case), scheme=scheme, transport="peer") as decoder,
        ):
            assert decoder.sent == staged.sent
            out, lse = decoder(*arrays)
            np.testing.assert_array_equal(out, wanted[0])
            assert_same_bits(comm, out, lse)


def test_a_schedule_of_ones_own(comm, runtime):
    """Two kinds of fold in a round, and records that are copied while their old value leaves."""
    own = collectives.build("k_nomial_tree:radix=3", comm.size)
    arrays = shard(comm)
    wanted = results_by_way_of_the_host(comm, arrays, scheme=own)
    with treeattn.Decoder(comm, **options(), scheme=own, transport="peer") as decoder:
        np.testing.assert_array_equal(decoder(*arrays)[0], wanted[0])


@pytest.mark.parametrize("scheme", ["all_gather_merge", "binary_tree"])
def test_a_captured_step_is_one_launch(comm, runtime, scheme):
    case = Case("float32", 64, group=2, tokens=33)
    q, k, v = shard(comm, case)
    lengths = np.zeros(1, np.int64)
    with treeattn.Decoder(comm, **options(case), scheme=scheme, transport="peer") as decoder:
        step = decoder.capture(q, k, v, lengths)
        launches = runtime.graph_launches
        for fraction in (1, 2, 2, 2):
            lengths[0] = k.shape[1] * fraction // 2
            captured = [array.copy() for array in step()]
            assert_same_bits(comm, *captured)
        assert runtime.graph_launches == launches + 4
        case.check(*captured, tensor_cores=False)


def test_ranks_of_a_node_may_share_a_gpu(comm, runtime):
    """Slow, as they share its time, but right: it needs no GPU for each."""
    runtime.identity = "0000:3b:00.0"
    arrays = shard(comm)
    wanted = results_by_way_of_the_host(comm, arrays)
    out, _ = treeattn.decode(*arrays, comm=comm, device="cuda", transport="peer")
    np.testing.assert_array_equal(out, wanted[0])


def test_two_decoders_at_a_time(comm, runtime):
    arrays = shard(comm)
    wanted = results_by_way_of_the_host(comm, arrays)
    with (
        treeattn.Decoder(comm, **options(), transport="peer") as one,
        treeattn.Decoder(comm, **options(), transport="peer", scheme="ring") as other,
    ):
        for _ in range(3):
            np.testing.assert_array_equal(one(*arrays)[0], wanted[0])
            other(*arrays)
    assert not runtime._maps


def test_ranks_of_several_nodes_are_refused_by_all(comm, runtime, monkeypatch):
    if comm.size == 1:
        return
    nodes = tuple(range(comm.size // 2)), tuple(range(comm.size // 2, comm.size))
    monkeypatch.setattr(comm_, "node_groups", lambda comm: nodes)
    with pytest.raises(treeattn.TransportError, match=r"one node.*ranks 0 and \d.*take transport='nccl', or"):
        treeattn.Decoder(comm, **options(), scheme="recursive_doubling", transport="peer")


@pytest.mark.parametrize("what", ["expose", "open_exposed"])
def test_a_rank_that_cannot_share_memory_is_told_by_all(comm, runtime, monkeypatch, what):
    """And nobody keeps what was exposed already."""
    if comm.size == 1:
        return

    def refused(*_):
        raise treeattn.TransportError("cudaErrorNotSupported; take transport='nccl' or 'host'")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(runtime, what, refused)
    with pytest.raises(
        treeattn.TransportError, match=f"rank {comm.size - 1}: .*cudaErrorNotSupported.*'host'"
    ):
        treeattn.Decoder(comm, **options(), transport="peer")
    assert not runtime._maps


def test_a_rank_that_does_not_come_is_named(comm, runtime, monkeypatch):
    """Those who wait get NaN at once, and an error at the next step and at the end; nobody hangs."""
    if comm.size == 1:
        return
    monkeypatch.setenv("TREEATTN_TIMEOUT", "1")
    arrays, absent = shard(comm), comm.size - 1
    decoder = treeattn.Decoder(comm, **options(), scheme="all_gather_merge", transport="peer")
    decoder(*arrays)
    began = time.monotonic()
    if comm.rank != absent:
        out, _ = decoder(*arrays)
        assert np.isnan(out).all()
        with pytest.raises(treeattn.TransportError, match=f"without rank {absent}"):
            decoder.synchronize()
        late = f"all_gather_merge, round 1: 1 s without rank {absent}.*TREEATTN_TIMEOUT"
        with pytest.raises(treeattn.TransportError, match=late):
            decoder(*arrays)
    with pytest.raises(
        treeattn.TransportError, match=f"1 s without {'the' if comm.rank == absent else 'rank'}"
    ):
        decoder.close()
    assert time.monotonic() - began < 20
    comm.Barrier()
    for _, file in runtime._maps.values():
        if file:
            os.unlink(file)
