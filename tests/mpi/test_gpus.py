"""device="cuda" over real ranks, one contract for every transport.

Each rank has an emulated GPU, whose arrays are NumPy's; shared memory stands for CUDA IPC, MPI for NCCL.
"""

import os
import random
import threading
from unittest import mock

import numpy as np
import pytest

import treeattn
from tests.emulator.cases import Case
from tests.support.drawn import FACTOR, sample
from tests.support.ranks import assert_same_bits, raised_by_all
from tests.support.schemes import REPLICATED, assert_equal, copies
from treeattn import Reduction, collectives
from treeattn.backends import cpu
from treeattn.backends.cuda import cupy_runtime
from treeattn.backends.cuda.device import Cuda
from treeattn.collectives.runtime import nccl, watchdog
from treeattn.collectives.runtime.mpi_communicator import MpiCommunicator
from treeattn.decoder import gpu_reducers
from treeattn.mpi import library
from treeattn.shards import parse_layout

CASE = Case("float32", 64, group=2, batch=2, queries=2, tokens=33)
SCHEDULES = collectives.names("schedule")


@pytest.fixture
def runtime(runtime):
    runtime.kernel("pull_partials", "pull_partials<InParameters>")  # compiled before anyone waits
    return runtime


@pytest.fixture
def two_nodes(comm, monkeypatch):
    """The first half of the ranks on one, and so on."""
    if comm.size == 1:
        pytest.skip("one rank is one node")
    nodes = tuple(range(comm.size // 2)), tuple(range(comm.size // 2, comm.size))
    monkeypatch.setattr(MpiCommunicator, "nodes", property(lambda comm: nodes))


def shard(comm, case=CASE):
    """q and this rank's part of k and v."""
    q, k, v, _, _ = case.inputs()
    (run,) = parse_layout("contiguous").runs(case.tokens, comm.rank, comm.size)
    return q, np.ascontiguousarray(k[:, run]), np.ascontiguousarray(v[:, run])


def decoder_of(comm, case=CASE, **how):
    return treeattn.Decoder(comm, **case.plan, scheme=Reduction(**how))


class Transport:
    """What each promises."""

    transport: str
    every = SCHEDULES
    graph = True  # of the whole step
    driver_calls = 0  # of the five steps behind the first

    @pytest.fixture(autouse=True)
    def _found(self, comm, runtime, nccl_communicators):
        self.comm, self.runtime, self.connected = comm, runtime, nccl_communicators

    def planned(self, scheme, case=CASE, **more):
        output = "heads" if scheme == "head_scatter" else "replicated"
        return decoder_of(
            self.comm, case, **{"scheme": scheme, "output": output, "transport": self.transport} | more
        )

    def test_the_bits_and_messages_of_the_host_without_allocating(self):
        arrays = shard(self.comm)
        drawn = random.Random(self.transport).sample(self.every, min(len(self.every), 5 * FACTOR))
        for scheme in drawn:
            with self.planned(scheme, transport="host") as staged:
                wanted, sent = copies(staged(*arrays)), staged.sent
            with self.planned(scheme) as decoder:
                decoder(*arrays)
                counted = self.runtime.allocations, self.runtime.launches, self.runtime.graph_launches
                driven = self.runtime.driver_calls
                for _ in range(5):
                    assert_equal(decoder(*arrays), wanted)
                assert self.runtime.allocations == counted[0]
                if not decoder.plan.buffers.sliced:
                    calls = self.driver_calls if self.comm.size > 1 else 5 * decoder._reducer.idle
                    assert self.runtime.driver_calls - driven == calls
                self.check_launches(decoder, scheme, *counted[1:])
                assert decoder.sent == sent
                assert decoder.transport == self.transport
                assert decoder.certificate == collectives.check(decoder.schedule)
            assert not self.runtime._maps
        self.check_end(len(drawn))

    def check_launches(self, decoder, scheme, launches, graphs):
        """As many as a transport says."""

    def check_end(self, decoders):
        assert not self.connected

    @pytest.mark.parametrize("scheme", ["recursive_doubling", "ring"])
    def test_a_captured_step_is_one_launch(self, scheme):
        case = Case("float32", 64, group=2, tokens=33)
        q, k, v = shard(self.comm, case)
        lengths = np.zeros(1, np.int64)
        with self.planned(scheme, case) as decoder:
            if self.transport == "host" or not (self.graph or self.comm.size == 1):  # one rank sends nothing
                with pytest.raises(treeattn.TransportError, match="'nccl'"):
                    decoder.capture(q, k, v, lengths)
                return
            step = decoder.capture(q, k, v, lengths)
            launches = self.runtime.graph_launches
            for number, halves in enumerate((1, 2, 2), 1):  # a growing cache
                lengths[0] = k.shape[1] * halves // 2
                captured = copies(step())
                assert self.runtime.graph_launches == launches + number
                assert_same_bits(self.comm, *captured)
            case.check(*captured, tensor_cores=False)
            last = self.comm.rank == self.comm.size - 1
            with pytest.raises(treeattn.ArgumentError, match="int64 device array"):
                decoder.capture(q, k, v, [1] if last else lengths)
            with pytest.raises(treeattn.ArgumentError, match="v is missing"):
                decoder.capture(q, k, None if last else v, lengths)
        with pytest.raises(treeattn.StateError, match="closed"):
            step()

    def test_the_parts_of_a_step_take_turns_with_whole_ones(self):
        arrays = shard(self.comm)
        with self.planned("hierarchical", transport="host") as staged:
            wanted = copies(staged(*arrays))
        with self.planned("hierarchical") as decoder, self.planned("ring") as other:
            for _ in range(3):
                assert_equal(decoder(*arrays), wanted)
                decoder.out[...] = 0
                other(*arrays)
                decoder.local(*arrays)
                decoder.reduce()
                assert not decoder.out.any()
                assert_equal(decoder.finish(), wanted)
                decoder.begin(*arrays)
                assert decoder.test() or not self.graph, "what is queued needs nothing more of the host"
                assert_equal(decoder.finish(), wanted)


class TestHost(Transport):
    transport = "host"
    graph = False

    @pytest.mark.parametrize("scheme", sample(2, [*REPLICATED, "mpi_allreduce"]))
    def test_exact(self, scheme):
        with self.planned(scheme) as decoder:
            for _ in range(2):
                CASE.check(*decoder(*shard(self.comm)), tensor_cores=False)
            assert (decoder.certificate is None) == (scheme == "mpi_allreduce")


class TestNccl(Transport):
    """Through a step as it is, a captured reduction and launched ones."""

    transport = "nccl"
    every = REPLICATED
    driver_calls = 4 * 2  # the graph is recorded in the second step; attention is before it, finish behind

    def check_launches(self, decoder, scheme, launches, graphs):
        assert self.runtime.graph_launches - graphs == (5 if self.comm.size > 1 else 0)

    def check_end(self, decoders):
        assert [one.ended for one in self.connected] == ["closed"] * decoders


class TestPeer(Transport):
    """One launch after attention, unless the result is a slice; a rank alone has none."""

    transport = "peer"
    driver_calls = 5 * 2

    def check_launches(self, decoder, scheme, launches, graphs):
        alone, heads = self.comm.size == 1, decoder.heads.stop - decoder.heads.start
        finishes = bool(heads) and scheme not in REPLICATED  # fewer heads than ranks, perhaps
        assert self.runtime.launches - launches == 5 * (1 if alone else 2 + finishes)

    def test_a_schedule_of_ones_own_and_ranks_that_share_a_gpu(self):
        """Two kinds of fold in a round, and records that are copied while their old value leaves."""
        own, arrays = collectives.build("k_nomial_tree:radix=3", self.comm.size), shard(self.comm)
        self.runtime.identity = "0000:3b:00.0"
        with self.planned(own, transport="host") as staged, self.planned(own) as decoder:
            assert_equal(decoder(*arrays), copies(staged(*arrays)))


@pytest.mark.usefixtures("two_nodes")
class TestPeerOnTwoNodes(Transport):
    """Peer memory within them, NCCL between: as it is queued, then as one graph."""

    transport = "peer"
    driver_calls = 4 * 2

    def check_launches(self, decoder, scheme, launches, graphs):
        assert decoder.executor == "peer_nccl"
        assert self.runtime.graph_launches - graphs == 5

    def check_end(self, decoders):
        assert [one.ended for one in self.connected] == ["closed"] * decoders


class TestCudaMpi(Transport):
    """The stream is waited for before every round, and nothing else is done by the host."""

    transport = "cuda-mpi"
    graph = False

    @pytest.fixture(autouse=True)
    def _aware(self, monkeypatch, _found):
        self.waits = []
        monkeypatch.setattr(library, "cuda_aware", lambda: True)
        monkeypatch.setattr(self.runtime, "synchronize", lambda: self.waits.append(1))

    def check_launches(self, decoder, scheme, launches, graphs):
        self.waits.clear()
        decoder(*shard(self.comm))
        assert len(self.waits) == len(decoder._reducer.rounds)

    def test_a_library_that_is_not_says_so(self, monkeypatch):
        monkeypatch.setattr(library, "cuda_aware", lambda: False)
        with pytest.raises(treeattn.TransportError, match="'nccl' or 'host'"):
            self.planned("ring")


# What libraries reduce


@pytest.mark.parametrize("scheme", ["nccl_allreduce", "nccl_allreduce:calls=3"])
def test_nccl_allreduce_is_exact(comm, runtime, nccl_communicators, scheme):
    """Sums in the library's order; ranks without tokens add nothing; NaN spoils its own head."""
    for tokens, scores in ((33, 1), (1, 1), (0, 1), (40, 1e4)):
        case = Case("float32", 64, group=2, batch=2, tokens=tokens, scores=scores)
        arrays = shard(comm, case)
        with treeattn.Decoder(comm, **case.plan, scheme=scheme) as decoder:
            for _ in range(3):
                case.check(*decoder(*arrays), tensor_cores=False)
            assert decoder.transport == "nccl"
            assert decoder.certificate is None
            if tokens == 40:
                if comm.rank == comm.size - 1:
                    arrays[1][0, 0, 1, 3] = np.nan
                out, lse = decoder(*arrays)
                assert (np.isnan(lse[0, :, 0]) == (np.arange(lse.shape[1]) // 2 == 1)).all()
                assert np.isfinite(out[1]).all()


# What all ranks are told


@pytest.mark.parametrize(
    ("place", "name", "said", "scheme"),
    [
        (cpu.MergeOperator, "mpi_function", "no C compiler", "mpi_allreduce"),
        ("runtime", "empty", "out of GPU memory", None),
        (cupy_runtime, "current", "out of GPU memory", None),
    ],
)
def test_what_one_rank_lacks_is_told_by_all(comm, runtime, monkeypatch, place, name, said, scheme):
    if comm.rank == comm.size - 1:
        fails = mock.Mock(side_effect=treeattn.BackendError(said))
        monkeypatch.setattr(runtime if place == "runtime" else place, name, fails)
    how = Reduction(scheme, transport="host")
    with pytest.raises(treeattn.BackendError, match=said):
        treeattn.decode(*shard(comm), comm=comm, device="cuda", scheme=how)


@pytest.mark.parametrize(("name", "rank"), [("to_host", 0), ("from_host", -1)])
def test_trouble_with_the_query_of_one_rank_is_told_by_all(comm, runtime, monkeypatch, name, rank):
    """Where it is read, by an error that is not ours, and where it arrives."""
    if comm.rank == rank % comm.size:
        monkeypatch.setattr(Cuda, name, mock.Mock(side_effect=RuntimeError("cudaErrorIllegalAddress")))
    how = Reduction(transport="host")
    with pytest.raises(treeattn.TreeattnError, match="RuntimeError: cudaErrorIllegalAddress"):
        treeattn.decode(*shard(comm), comm=comm, device="cuda", scheme=how, q_root=0)


# What is taken where no transport is named


@pytest.fixture
def unnamed(comm, runtime, monkeypatch, capfd):
    """Called: (transport, what rank 0 says) of two decoders that name none, with the bits of the host."""
    arrays = shard(comm)
    with decoder_of(comm, scheme="hierarchical", transport="host") as staged:
        wanted = copies(staged(*arrays))
    monkeypatch.setitem(gpu_reducers.PLANNERS, "host", lambda *_: pytest.fail("by the host, unasked"))
    gpu_reducers.say.cache_clear()

    def made():
        for _ in range(2):
            with decoder_of(comm, scheme="hierarchical") as decoder:
                for _ in range(3):
                    assert_equal(decoder(*arrays), wanted)
                transport = decoder.transport
        assert not runtime._maps
        return transport, capfd.readouterr().err

    return made


def lines(comm, text):
    """What rank 0 is to say, alone."""
    return "" if comm.rank else f"treeattn: records travel from GPU to GPU by {text}\n"


def test_gpus_of_a_node_read_one_anothers_memory(comm, unnamed):
    if comm.size == 1:
        assert unnamed() == ("mpi", "")
    else:
        assert unnamed() == ("peer", lines(comm, "peer memory (transport='peer')"))


@pytest.mark.usefixtures("two_nodes", "nccl_communicators")
def test_nodes_of_several_gpus_send_between_them_by_nccl(comm, unnamed):
    nodes = "peer memory within nodes and NCCL between them (transport='peer')"
    assert unnamed() == (("peer", lines(comm, nodes)) if comm.size > 2 else by_nccl(comm))


def by_nccl(comm, more=""):
    return "nccl", lines(comm, f"NCCL (transport='nccl'){more}")


@pytest.mark.parametrize("place", ["expose", "open_exposed"])
def test_memory_that_one_rank_cannot_open_leaves_nccl(
    comm, several, runtime, unnamed, nccl_communicators, monkeypatch, place
):
    if comm.rank == comm.size - 1:
        closed = mock.Mock(side_effect=treeattn.TransportError("no peer access"))
        monkeypatch.setattr(runtime, place, closed)
    why = f"no transport='peer': rank {comm.size - 1}: no peer access"
    assert unnamed() == by_nccl(comm, f"; {why}")
    lacking = "no NCCL: install treeattn[nccl12]" if comm.rank == 0 else None
    monkeypatch.setattr(nccl, "problem", lambda: lacking)
    said = raised_by_all(comm, unnamed, f"^{why}; no transport='nccl': rank 0: no NCCL")
    assert said.endswith("; transport='host' copies through the memory of the hosts, where it is named")


def test_what_is_named_is_never_another(comm, several, runtime):
    with pytest.raises(
        treeattn.TransportError, match="mpi_allreduce on device='cuda' is for transport='host'"
    ):
        decoder_of(comm, scheme="mpi_allreduce")
    mine = Reduction(transport="host" if comm.rank else "nccl")
    with pytest.raises(treeattn.ArgumentError, match="transport differs"):
        treeattn.decode(*shard(comm), comm=comm, device="cuda", scheme=mine)


@pytest.mark.parametrize(
    ("version", "variable", "remedy"),
    [
        ((2, 30), None, "NCCL_MULTI_RANK_GPU_ENABLE=1 is set for every rank.*'host'"),
        ((2, 28), "1", "NCCL 2.28 needs one for each: install NCCL 2.30 or newer.*'host'"),
    ],
)
def test_ranks_on_one_gpu_are_refused_by_all(
    comm, several, runtime, nccl_communicators, monkeypatch, version, variable, remedy
):
    """Also where the variable is missing on one rank alone."""
    runtime.identity = "8f1c0a52"
    monkeypatch.setattr(nccl, "version", lambda: version)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", variable or ("0" if comm.rank == comm.size - 1 else "1"))
    with pytest.raises(treeattn.TransportError, match=rf"ranks 0, 1.* share GPU 8f1c0a52 of .*{remedy}"):
        decoder_of(comm, transport="nccl")
    assert not nccl_communicators


def test_an_nccl_that_lacks_or_differs_on_one_rank_is_told_by_all(comm, several, runtime, monkeypatch):
    """Before they meet; in one line where peers need it between nodes."""
    lacking = "no NCCL: install treeattn[nccl12]" if comm.rank == comm.size - 1 else None
    monkeypatch.setattr(nccl, "version", lambda: (2, 30 + comm.rank))
    with monkeypatch.context() as patch:
        patch.setattr(nccl, "problem", lambda: None)
        with pytest.raises(treeattn.ArgumentError, match="the version of NCCL differs between ranks"):
            decoder_of(comm, transport="nccl")
    monkeypatch.setattr(nccl, "problem", lambda: lacking)
    monkeypatch.setattr(nccl, "version", lambda: (2, 30))
    with pytest.raises(treeattn.TransportError, match="no NCCL"):
        decoder_of(comm, transport="nccl")
    nodes = tuple((rank,) for rank in range(comm.size))
    monkeypatch.setattr(MpiCommunicator, "nodes", property(lambda comm: nodes))
    said = f"^transport='peer' sends between nodes by NCCL: rank {comm.size - 1}: no NCCL: install[^\n]*$"
    for call in (
        lambda: decoder_of(comm, transport="peer"), lambda: gpu_reducers._check_peers(comm, runtime)
    ):  # fmt: skip
        with pytest.raises(treeattn.TransportError, match=said):
            call()


@pytest.mark.parametrize("transport", ["nccl", "cuda-mpi", "prefill"])
def test_no_room_for_messages_on_one_rank_is_told_by_all(
    comm, several, runtime, nccl_communicators, monkeypatch, transport
):
    """What is allocated while the reduction is planned, after NCCL has connected."""
    monkeypatch.setattr(library, "cuda_aware", lambda: True)
    sizes = []

    def few(shape, dtype):
        sizes.append(shape)
        if len(sizes) > 3 and comm.rank == 0:  # records, out and lse fit
            raise treeattn.BackendError("out of GPU memory")
        return np.empty(shape, dtype)

    def prompt():
        shape = {"heads": 2, "kv_heads": 2, "head_dim": 64, "dtype": "float32"}
        return treeattn.Prefill(comm, tokens=2, **shape, device="cuda")

    monkeypatch.setattr(runtime, "empty", few)
    how = {"scheme": "recursive_doubling", "transport": transport}
    with pytest.raises(treeattn.BackendError, match="rank 0: out of GPU memory"):
        prompt() if transport == "prefill" else decoder_of(comm, **how)
    assert [one.ended for one in nccl_communicators] == ["aborted"] * (transport != "cuda-mpi")


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("what", ["expose", "open_exposed"])
def test_a_rank_that_cannot_share_memory_is_told_by_all(
    comm, runtime, nccl_communicators, monkeypatch, request, what, nodes
):
    if comm.size < 2 * nodes:  # nobody opens anything on a node of one
        return
    refused = treeattn.TransportError("cudaErrorNotSupported; take transport='nccl' or 'host'")
    if nodes == 2:
        request.getfixturevalue("two_nodes")
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(runtime, what, mock.Mock(side_effect=refused))
    said = f"rank {comm.size - 1}: .*cudaErrorNotSupported.*'host'"
    with pytest.raises(treeattn.TransportError, match=said):
        decoder_of(comm, transport="peer")
    assert not runtime._maps
    assert [one.ended for one in nccl_communicators] == ["closed"] * (nodes == 2)


# Waits that end


@pytest.fixture
def impatient(runtime, monkeypatch):
    """A limit of one second; what decoders that could not close have exposed is freed by the end."""
    monkeypatch.setenv("TREEATTN_TIMEOUT", "1")
    # The emulator's kernels block where they wait.
    monkeypatch.setattr(watchdog, "register", lambda thing: None)
    yield
    for _, file in runtime._maps.values():
        if file:
            os.unlink(file)


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_does_not_come_is_named(comm):
    """Who waits gets NaN at once, and an error at the next step and at the end; nobody hangs."""
    pair = comm.Split(comm.rank // 2, comm.rank)  # of more ranks another one might be late
    if pair.size == 2:
        arrays, decoder = shard(pair), decoder_of(pair, scheme="all_gather_merge", transport="peer")
        if pair.rank == 0:
            assert np.isnan(decoder(*arrays)[0]).all()
            with pytest.raises(treeattn.TransportError, match="without rank 1"):
                decoder.synchronize()
            late = "all_gather_merge, round 1: 1 s without rank 1.*TREEATTN_TIMEOUT"
            with pytest.raises(treeattn.TransportError, match=late):
                decoder(*arrays)
        with pytest.raises(treeattn.TransportError, match=f"1 s without {'the' if pair.rank else 'rank'}"):
            decoder.close()
    comm.Barrier()


@pytest.mark.usefixtures("impatient", "two_nodes", "nccl_communicators")
def test_a_rank_that_does_not_come_on_one_of_two_nodes(comm):
    """Its leader names it; the others have NaN in this step, then an error; nobody hangs."""
    if comm.size != 4:
        pytest.skip("the two nodes have two ranks each")
    arrays, decoder = shard(comm), decoder_of(comm, scheme="hierarchical", transport="peer")
    if comm.rank != 3:
        assert np.isnan(decoder(*arrays)[0]).all()
    if comm.rank == 2:  # the only one that waits for rank 3 in shared memory
        for wait in (lambda: decoder(*arrays), decoder.synchronize):
            with pytest.raises(treeattn.TransportError, match="round 1: 1 s without rank 3"):
                wait()
    else:
        with pytest.raises(treeattn.TransportError, match=r"1 s without|NCCL's end"):
            decoder.close()
    comm.Barrier()


@pytest.mark.usefixtures("nccl_communicators", "several")
def test_the_end_of_a_prefill_that_a_gpu_never_comes_to_is_told(comm, runtime, monkeypatch):
    monkeypatch.setenv("TREEATTN_TIMEOUT", "1")
    shape = {"tokens": 2, "heads": 2, "kv_heads": 2, "head_dim": 64, "dtype": "float32"}
    planned = treeattn.Prefill(comm, **shape, device="cuda")
    monkeypatch.setattr(runtime, "synchronize_all", threading.Event().wait)
    with pytest.raises(treeattn.PeerTimeoutError, match="the prefill's ring: 1 s without the blocks of rank"):
        planned.close()
