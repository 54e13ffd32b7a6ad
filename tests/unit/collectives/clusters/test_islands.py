"""Four islands of four GPUs over PCIe: which scheme wins at which size, as b12x#139 measured it."""

from __future__ import annotations

import pytest

from treeattn.collectives import build
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.placement import block, node_groups
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.traffic import Payload

CLUSTER = description.load("pcie-islands")
PLACES = block(CLUSTER, 16)
STAR = "hierarchical:inner=(k_ary_tree:radix=4)"
RAILS = "split_rail"  # reduce-scatter in the island

# KB -> microseconds: NCCL, hierarchical, island reduce-scatter
MEASURED = {14: (36.1, 18.2, 20.5), 57: (36.5, 30.4, 22.4), 115: (39.7, 46.8, 26.0)}


def microseconds(scheme, kilobytes, cluster=CLUSTER):
    schedule = build(scheme, 16, nodes=node_groups(CLUSTER, PLACES))
    return simulate(schedule, cluster, PLACES, Payload(1000, int(kilobytes))).time


def nccl(kilobytes):
    """Its ring over PCIe by its own prices (tuning.cc): 6.6 for the call, 30 hops of 1.0; and bytes at
    the rate of the two measurements that are furthest apart."""
    return 6.6 + 30 * 1.0 + kilobytes * (39.7 - 36.1) / (115 - 14)


@pytest.mark.parametrize("size", MEASURED)
def test_the_ranking_of_every_size(size):
    predicted = nccl(size), microseconds(STAR, size), microseconds(RAILS, size)
    for one, other, most in zip(predicted, MEASURED[size], (0.07, 0.04, 0.04), strict=True):
        assert one == pytest.approx(other, rel=most)
    ranking = sorted(range(3), key=MEASURED[size].__getitem__)
    assert sorted(range(3), key=predicted.__getitem__) == ranking
