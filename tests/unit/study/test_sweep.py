"""What is measured, in which order, and how many messages that is."""

from types import SimpleNamespace
from unittest import mock

import made_results
import pytest
from msgspec.structs import replace

from treeattn.backends import cpu
from treeattn.backends.cpu.records import MergeOperator
from treeattn.cli import compare
from treeattn.collectives.clusters import description
from treeattn.errors import ArgumentError
from treeattn.mpi import topology
from treeattn.study import intervals
from treeattn.study.compare import measure, prediction, steps
from treeattn.study.compare.measure import Block, Budget, blocks
from treeattn.study.compare.prediction import predicted
from treeattn.study.compare.rows import SUM, Key
from treeattn.study.environment import _machine, node_load

CASE = made_results.keys(["ring", "chain", "binary_tree"], [0])


@pytest.fixture
def bench(monkeypatch):
    """One rank whose blocks take a second each; of "chain" nothing can be planned."""

    class Bench:
        def __init__(self, comm, budget, user_schedules):
            pass

        def inputs(self, key):
            if key.tokens == 13:
                raise ArgumentError("no room")

        def block(self, key, inputs):
            if key.scheme == "chain":
                raise ArgumentError("not for these ranks")
            return {"took_us": 1e6}

    monkeypatch.setattr(measure, "Bench", Bench)
    return SimpleNamespace(bcast=lambda value: value)


def measured(comm, keys, **changes):
    found = measure.sweep(comm, keys, **{"budget": Budget(3), **changes})
    return [(block.key.scheme, block.repetition, result) for block, result in found]


def test_schemes_change_places_in_each_repetition():
    plan = list(blocks(CASE, 20))
    orders = [tuple(block.key.scheme for block in plan[i : i + 3]) for i in range(0, 60, 3)]
    assert len(set(orders)) > 3
    assert plan == list(blocks(CASE, 20))  # the same on every rank
    assert set(plan) == {Block(key, repetition) for key in CASE for repetition in range(20)}


def test_what_is_done_is_not_done_again_and_what_cannot_run_is_asked_once(bench):
    done = {Block(CASE[0], 0): 5.0}
    found = measured(bench, CASE, done=done)
    ring = sorted(repetition for scheme, repetition, _ in found if scheme == "ring")
    assert ring == [1, 2]
    assert sum(scheme == "binary_tree" for scheme, *_ in found) == 3
    assert [str(result) for scheme, _, result in found if scheme == "chain"] == ["not for these ranks"]


def test_inputs_without_room_are_told_of_every_scheme(bench):
    keys = made_results.keys(["ring", "chain"], [13, 64])
    found = measured(bench, keys)
    assert [(scheme, str(result)) for scheme, _, result in found[:2]] == [
        ("ring", "no room"), ("chain", "no room"),
    ]  # fmt: skip
    assert len(found) == 2 + 3 + 1


@pytest.mark.parametrize(
    ("slowest", "iterations"),
    [(1e-6, 200), (1e-3, 30), (0.01, 20), (0.05, 10), (1.0, 3)],
)
def test_blocks_have_enough_iterations_where_patience_lasts(slowest, iterations):
    """10 blocks in 0.3 seconds, else of 20 iterations in 5 seconds, else of 3."""
    assert Budget(10, 200, 0.3, 10.0).count(slowest) == iterations
    assert Budget(10, 7, 0.3, 10.0).count(slowest) == min(iterations, 7)


def tiers(messages_intra, bytes_intra, messages_inter=0, bytes_inter=0):
    return {"messages_intra": messages_intra, "bytes_intra": bytes_intra,
            "messages_inter": messages_inter, "bytes_inter": bytes_inter}  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "groups", "found"),
    [
        ([[(1, 10), (2, 20)], [(0, 5)], []], ((0, 1), (2,)), tiers(2, 15, 1, 20)),
        ([7] * 3, ((0, 1, 2),), tiers(None, 21)),
        ([7] * 3, ((0, 2), (1,)), {"bytes_library": 21}),
        ([None, None, None], ((0, 1, 2),), None),
    ],
)
def test_what_was_handed_over_by_tier(sent, groups, found):
    ranks = SimpleNamespace(allgather=lambda mine: sent)
    assert measure.handed_over(ranks, sent[0], groups) == found


@pytest.mark.parametrize("size", [384, *(1 << bits for bits in range(5, 21))])
def test_a_power_of_two_is_a_message_of_so_many_bytes(size):
    """Which joins the tables of other benchmarks; and the library's own reduction has an operator for it."""
    heads, head_dim = compare._shape_of_bytes(size / 4, 126)
    (key,) = made_results.keys(["ring"], [0], heads=heads, kv_heads=heads, head_dim=head_dim)
    assert key.record_bytes == size
    assert compare._shape_of_bytes(size / 4 + 1, 126) == (heads, head_dim)  # the nearest
    assert steps.shape_of(key).lse_shape == (1, heads, 1)
    if cpu.compiled_kernels_problem() is None:
        assert MergeOperator(head_dim).mpi_function()


def test_a_librarys_sum_is_planned_over_its_own_transport(monkeypatch):
    monkeypatch.setattr(steps, "library_sum", lambda key, spec: f"the sum over {key.transport}")
    local = object.__new__(steps._LocalPlan)
    (local.key,) = made_results.keys([SUM], [0], device="cuda", transport="nccl")
    assert local.reduction(None) == (None, "nccl", "the sum over nccl")


@pytest.mark.parametrize("tokens", [64, 0])
def test_the_clock_stops_when_the_gpu_is_done(tokens):
    gpu = mock.Mock()
    problem = SimpleNamespace(q="q", k="k", v="v", records="fresh", device=gpu)
    (key,) = made_results.keys(["ring"], [tokens], device="cuda", transport="nccl")
    (part,), prepare = measure._calls(key, problem, gpu.step)
    prepare()
    part()
    fresh = [mock.call.memory.copy(gpu.step.records, "fresh"), mock.call.memory.synchronize()]
    work = [mock.call.step("q", "k", "v")] if tokens else [*fresh, mock.call.step.fold()]
    assert gpu.mock_calls == [*work, mock.call.step.synchronize()]


KEY = Key("reduce", "recursive_doubling", 2, 0, 1, 1, 16, 16, 128, "bfloat16")
LAPTOP, DGX = description.load("laptop"), description.load("dgx-h100")


def microseconds(cluster, places, nodes, key):
    return predicted(cluster, places, nodes, key, {}).time


def test_the_host_is_predicted_by_what_a_decoder_takes_on_one_node():
    slots = replace(LAPTOP, executors={"slots": LAPTOP.executors["slots"]}, executor="slots")
    assert microseconds(LAPTOP, (0, 1), [[0, 1]], KEY) == microseconds(slots, (0, 1), [[0, 1]], KEY) > 0


@pytest.mark.parametrize(
    ("transport", "executor"), [("nccl", "nccl"), ("peer", "peer"), ("host", "mpi"), ("cuda-mpi", "mpi")]
)
def test_a_transport_of_gpus_is_predicted_by_its_executor(transport, executor):
    key = replace(KEY, device="cuda", transport=transport)
    alone = replace(DGX, executors={executor: DGX.executors[executor]}, executor=executor)
    assert microseconds(DGX, (0, 1), [[0, 1]], key) == microseconds(alone, (0, 1), [[0, 1]], key) > 0


@pytest.mark.parametrize("scheme", ["binary_tree", "query_ring"])
def test_records_of_float64_are_as_long_as_those_of_twice_as_many_elements(scheme):
    """Of a whole step over no tokens: its reduction is left."""
    key = replace(KEY, what="decode", scheme=scheme, head_dim=126, dtype="float64")
    wide = replace(key, head_dim=254, dtype="float32")
    assert microseconds(LAPTOP, (0, 1), [[0, 1]], key) == microseconds(LAPTOP, (0, 1), [[0, 1]], wide) > 0


@pytest.fixture
def of_two(monkeypatch):
    """`predictions` on a cluster for two ranks of one node."""
    ranks = topology.Topology(tuple(topology.Rank(rank, 0, ()) for rank in range(2)))
    monkeypatch.setattr(topology, "detect", lambda world: ranks)
    world = SimpleNamespace(rank=0, size=1, allgather=lambda value: [value])
    return lambda cluster, *keys: prediction.predictions(
        world, topology.Described(cluster, "--cluster"), keys, {}
    )


def test_an_executor_without_prices_is_named(of_two):
    key = replace(KEY, device="cuda", transport="host")
    found, said = of_two(description.load("leonardo"), key, KEY)
    assert [*found] == [KEY]
    assert "; no prices: leonardo: executors: there is no 'mpi'; choose from program\n" in said


def test_an_order_that_assumed_prices_decide_is_said_once(of_two, monkeypatch):
    unsure = intervals.Estimate(*[1.0] * 6, assumed_decides=True)
    monkeypatch.setattr(prediction, "estimates", lambda cluster, costs: [unsure] * len(costs))
    keys = [KEY, replace(KEY, heads=8, kv_heads=8)]
    found, said = of_two(DGX, *keys)
    assert [*found] == keys
    assert said.endswith("alone decide whether the fastest is faster than recursive_doubling")


def entries(*hosts: tuple[str, str, set[int]]) -> list[dict]:
    """What `placement` makes of ranks on (host, kernel, cores)."""
    everyone = [({"host": host, "cores": len(cores)}, kernel, cores) for host, kernel, cores in hosts]
    return [entry | _machine(kernel, everyone) for entry, kernel, _ in everyone]


def test_ranks_bound_to_cores_of_their_own_are_no_crowd():
    assert node_load(entries(("a", "k1", {0}), ("a", "k1", {1}), ("b", "k2", {0}), ("b", "k2", {1}))) is None


def test_ranks_bound_to_one_core_are_a_crowd():
    warning = node_load(entries(("a", "k1", {0}), ("a", "k1", {0}), ("b", "k2", {0})))
    assert warning == "2 ranks share 1 cores of a: times show waiting, not the scheme"


def test_nodes_of_one_kernel_share_its_cores():
    """Emulated nodes and containers: each believes that it has all cores."""
    ranks = entries(*((f"node{rank // 2}", "k1", {0, 1}) for rank in range(4)))
    assert [entry["machine"] for entry in ranks] == [0, 0, 0, 0]
    assert node_load(ranks) == "4 ranks share 2 cores of node0 and node1: times show waiting, not the scheme"
