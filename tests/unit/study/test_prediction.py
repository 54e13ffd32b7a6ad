"""What `compare` predicts: every executor that a cluster has prices of, by the name that ran it."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from treeattn.collectives.clusters import description
from treeattn.mpi import topology
from treeattn.study import intervals
from treeattn.study.compare import prediction
from treeattn.study.compare.prediction import lacking, predicted
from treeattn.study.compare.rows import Key

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


def test_an_executor_without_prices_is_named():
    leonardo, key = description.load("leonardo"), replace(KEY, device="cuda", transport="host")
    assert predicted(leonardo, (0, 1), [[0], [1]], key, {}) is None
    assert lacking(leonardo, (0, 1), key) == (
        "no prices: leonardo: executors: there is no 'mpi'; choose from program"
    )
    assert lacking(leonardo, (0, 1), KEY) == ""


def test_an_order_that_assumed_prices_decide_is_said_once(monkeypatch):
    ranks = topology.Topology(tuple(topology.Rank(rank, 0, ()) for rank in range(2)))
    monkeypatch.setattr(topology, "detect", lambda world: ranks)
    unsure = intervals.Estimate(*[1.0] * 6, assumed_decides=True)
    monkeypatch.setattr(prediction, "estimates", lambda cluster, costs: [unsure] * len(costs))
    world = SimpleNamespace(rank=0, size=1, allgather=lambda value: [value])
    keys = [KEY, replace(KEY, heads=8, kv_heads=8)]
    found, said = prediction.predictions(world, topology.Described(DGX, "--cluster"), keys, {})
    assert [*found] == keys
    assert said.endswith("alone decide whether the fastest is faster than recursive_doubling")
