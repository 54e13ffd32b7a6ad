"""transport="peer" over real ranks: each has an emulated GPU, and shared memory stands for CUDA IPC."""

from __future__ import annotations

import os

import numpy as np
import pytest
from test_cuda import (
    CASE,
    REPLICATED,
    SCHEDULES,
    assert_equal,
    assert_same_bits,
    by_way_of_the_host,
    shard,
)

import treeattn
from tests.emulator.cases import Case
from tests.emulator.raw_module import compiler_problem
from tests.emulator.runtime import EmulatorRuntime
from treeattn import collectives
from treeattn.backends.cuda import cupy_runtime
from treeattn.cli import doctor_gpu
from treeattn.collectives.runtime import nccl, watchdog
from treeattn.decoder import gpu_reducers
from treeattn.mpi import communicators

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem())),
]


@pytest.fixture
def runtime(comm, monkeypatch):
    """What device="cuda" finds on this rank; whatever it exposed is freed by the end."""
    emulator = EmulatorRuntime(seed=comm.rank)
    monkeypatch.setattr(cupy_runtime, "current", lambda: emulator)
    emulator.kernel("pull_partials", "pull_partials<InParameters>")  # compiled before anyone waits
    return emulator


def over_peers(comm, case=CASE, **planned):
    return treeattn.Decoder(comm, **case.plan, scheme=treeattn.Reduction(**planned, transport="peer"))


@pytest.mark.parametrize("scheme", SCHEDULES)
def test_it_gives_the_bits_of_the_host(comm, runtime, scheme):
    """Step after step, without allocating; one launch after attention, unless the result is a slice."""
    arrays = shard(comm)
    planned = {"scheme": scheme, "output": "replicated" if scheme in REPLICATED else "heads"}
    wanted, _ = by_way_of_the_host(comm, arrays, **planned)
    with over_peers(comm, **planned) as decoder:
        decoder(*arrays)
        launches, allocations = runtime.launches, runtime.allocations
        for _ in range(5):
            assert_equal(decoder(*arrays), wanted)
        assert runtime.allocations == allocations
        alone, heads = comm.size == 1, decoder.heads.stop - decoder.heads.start
        finishes = bool(heads) and (alone or scheme not in REPLICATED)  # there may be fewer heads than ranks
        assert runtime.launches - launches == 5 * (1 + (not alone) + finishes)
        assert decoder.transport == "peer"
        assert decoder.certificate == collectives.check(decoder.schedule)
    assert not runtime._maps


def test_the_parts_of_a_step_are_launches_of_their_own(comm, runtime):
    """And may take turns with whole steps."""
    arrays = shard(comm)
    wanted, _ = by_way_of_the_host(comm, arrays)
    with over_peers(comm) as decoder:
        for _ in range(3):
            np.testing.assert_array_equal(decoder(*arrays)[0], wanted[0])
            decoder.out[...] = 0
            decoder.local(*arrays)
            decoder.reduce()
            assert not decoder.out.any()
            assert_equal(decoder.finish(), wanted)
            decoder.begin(*arrays)
            np.testing.assert_array_equal(decoder.finish()[0], wanted[0])


@pytest.mark.parametrize("batch", [1, 3])
def test_one_shot_and_two_shot(comm, runtime, batch):
    """A step of each counts the same messages as over MPI."""
    case = Case("float16", 64, kv_heads=8, batch=batch, tokens=33)
    arrays = shard(comm, case)
    for scheme in ("all_gather_merge", "reduce_scatter_gather"):
        wanted, sent = by_way_of_the_host(comm, arrays, case, scheme=scheme)
        with over_peers(comm, case, scheme=scheme) as decoder:
            assert decoder.sent == sent
            out, lse = decoder(*arrays)
            np.testing.assert_array_equal(out, wanted[0])
            assert_same_bits(comm, out, lse)


def test_a_schedule_of_ones_own(comm, runtime):
    """Two kinds of fold in a round, and records that are copied while their old value leaves."""
    own = collectives.build("k_nomial_tree:radix=3", comm.size)
    arrays = shard(comm)
    wanted, _ = by_way_of_the_host(comm, arrays, scheme=own)
    with over_peers(comm, scheme=own) as decoder:
        np.testing.assert_array_equal(decoder(*arrays)[0], wanted[0])


@pytest.mark.parametrize("scheme", ["all_gather_merge", "binary_tree"])
def test_a_captured_step_is_one_launch(comm, runtime, scheme):
    case = Case("float32", 64, group=2, tokens=33)
    q, k, v = shard(comm, case)
    lengths = np.zeros(1, np.int64)
    with over_peers(comm, case, scheme=scheme) as decoder:
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
    wanted, _ = by_way_of_the_host(comm, arrays)
    out, _ = treeattn.decode(*arrays, comm=comm, device="cuda", scheme=treeattn.Reduction(transport="peer"))
    np.testing.assert_array_equal(out, wanted[0])


def test_two_decoders_at_a_time(comm, runtime):
    arrays = shard(comm)
    wanted, _ = by_way_of_the_host(comm, arrays)
    with over_peers(comm) as one, over_peers(comm, scheme="ring") as other:
        for _ in range(3):
            np.testing.assert_array_equal(one(*arrays)[0], wanted[0])
            other(*arrays)
    assert not runtime._maps


def on_two_nodes(comm, monkeypatch):
    """The first half of the ranks on one, and so on."""
    nodes = tuple(range(comm.size // 2)), tuple(range(comm.size // 2, comm.size))
    monkeypatch.setattr(communicators, "node_groups", lambda comm: nodes)


@pytest.mark.parametrize("scheme", SCHEDULES)
def test_two_nodes_give_the_bits_of_the_host(comm, runtime, nccl_communicators, monkeypatch, scheme):
    """Peer memory within them, NCCL between: as it is queued, then as one graph, without allocating."""
    if comm.size == 1:
        return
    on_two_nodes(comm, monkeypatch)
    runtime.identity = f"emulated GPU {comm.rank}"
    arrays = shard(comm)
    planned = {"scheme": scheme, "output": "replicated" if scheme in REPLICATED else "heads"}
    wanted, sent = by_way_of_the_host(comm, arrays, **planned)
    with over_peers(comm, **planned) as decoder:
        assert decoder.executor == "peer_nccl"
        assert decoder.sent == sent
        assert decoder.certificate == collectives.check(decoder.schedule)
        decoder(*arrays)
        allocations, graphs = runtime.allocations, runtime.graph_launches
        for _ in range(5):
            assert_equal(decoder(*arrays), wanted)
        assert (runtime.allocations, runtime.graph_launches) == (allocations, graphs + 5)
    assert not runtime._maps
    assert [communicator.ended for communicator in nccl_communicators] == ["closed"]


def test_a_captured_step_over_two_nodes_is_one_launch(comm, runtime, nccl_communicators, monkeypatch):
    if comm.size == 1:
        return
    on_two_nodes(comm, monkeypatch)
    runtime.identity = f"emulated GPU {comm.rank}"
    arrays = shard(comm)
    wanted, _ = by_way_of_the_host(comm, arrays)
    with over_peers(comm) as decoder:
        step = decoder.capture(*arrays)
        launches = runtime.graph_launches
        for number in range(1, 5):
            np.testing.assert_array_equal(step()[0], wanted[0])
            assert runtime.graph_launches == launches + number


def test_several_nodes_want_nccl(comm, runtime, monkeypatch):
    """All say so in one line, and nobody waits."""
    if comm.size == 1:
        return
    on_two_nodes(comm, monkeypatch)
    lacking = "no NCCL: install treeattn[nccl12]" if comm.rank == comm.size - 1 else None
    monkeypatch.setattr(nccl, "problem", lambda: lacking)
    monkeypatch.setattr(nccl, "version", lambda: (2, 30))
    said = f"transport='peer' sends between nodes by NCCL: rank {comm.size - 1}: no NCCL: install"
    for problem in (
        lambda: over_peers(comm),
        None,
    ):
        with pytest.raises(treeattn.TransportError) as caught:
            problem() if problem else gpu_reducers._check_peers(comm, runtime)
        assert str(caught.value).startswith(said)
        assert "\n" not in str(caught.value)


def test_a_rank_that_does_not_come_on_one_of_two_nodes(comm, runtime, nccl_communicators, monkeypatch):
    """Its leader names it; the others have NaN in this step, then an error; nobody hangs."""
    four = comm.Split(comm.rank // 4, comm.rank)
    if four.size == 4:
        monkeypatch.setenv("TREEATTN_TIMEOUT", "1")
        # The emulator's kernels block where they wait.
        monkeypatch.setattr(watchdog, "register", lambda thing: None)
        on_two_nodes(four, monkeypatch)
        runtime.identity = f"emulated GPU {comm.rank}"
        arrays, decoder = shard(four), over_peers(four, scheme="hierarchical")
        if four.rank != 3:
            assert np.isnan(decoder(*arrays)[0]).all()
        if four.rank == 2:  # the only one that waits for rank 3 in shared memory
            for wait in (lambda: decoder(*arrays), decoder.synchronize):
                with pytest.raises(treeattn.TransportError, match="round 1: 1 s without rank 3"):
                    wait()
        else:
            with pytest.raises(treeattn.TransportError, match=r"1 s without|NCCL's end"):
                decoder.close()
    comm.Barrier()
    withdraw(runtime)


def withdraw(runtime):
    """What was exposed by decoders that could not close."""
    for _, file in runtime._maps.values():
        if file:
            os.unlink(file)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("what", ["expose", "open_exposed"])
def test_a_rank_that_cannot_share_memory_is_told_by_all(
    comm, runtime, nccl_communicators, monkeypatch, what, nodes
):
    """And nobody keeps what was exposed already."""
    if comm.size < 2 * nodes:  # nobody opens anything on a node of one
        return

    def refused(*_):
        raise treeattn.TransportError("cudaErrorNotSupported; take transport='nccl' or 'host'")

    if nodes == 2:
        on_two_nodes(comm, monkeypatch)
        runtime.identity = f"emulated GPU {comm.rank}"
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(runtime, what, refused)
    said = f"rank {comm.size - 1}: .*cudaErrorNotSupported.*'host'"
    with pytest.raises(treeattn.TransportError, match=said):
        over_peers(comm)
    assert not runtime._maps
    assert [communicator.ended for communicator in nccl_communicators] == ["closed"] * (nodes == 2)


def test_a_rank_that_does_not_come_is_named(comm, runtime, monkeypatch):
    """Who waits gets NaN at once, and an error at the next step and at the end; nobody hangs."""
    pair = comm.Split(comm.rank // 2, comm.rank)  # of more ranks another one might be late
    if pair.size == 2:
        monkeypatch.setenv("TREEATTN_TIMEOUT", "1")
        arrays, decoder = shard(pair), over_peers(pair, scheme="all_gather_merge")
        if pair.rank == 0:
            out, _ = decoder(*arrays)
            assert np.isnan(out).all()
            with pytest.raises(treeattn.TransportError, match="without rank 1"):
                decoder.synchronize()
            late = "all_gather_merge, round 1: 1 s without rank 1.*TREEATTN_TIMEOUT"
            with pytest.raises(treeattn.TransportError, match=late):
                decoder(*arrays)
        with pytest.raises(treeattn.TransportError, match=f"1 s without {'the' if pair.rank else 'rank'}"):
            decoder.close()
    comm.Barrier()
    withdraw(runtime)


def test_the_trial_of_doctor(comm, runtime, monkeypatch, capsys):
    """Its program, of the first two ranks: a pull over the other's memory, right and in time."""
    monkeypatch.setattr(cupy_runtime, "choose", lambda rank: None)
    pair = comm.Split(comm.rank // 2, comm.rank)
    if pair.size == 2:
        exec(doctor_gpu._PEER_MEMORY.replace("MPI.COMM_WORLD", "pair"), {"pair": pair})
        assert capsys.readouterr().out == "right\n"
    pair.Free()
