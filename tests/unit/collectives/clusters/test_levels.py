"""More than two levels: what a cluster and places make of them, and that the schedules are right."""

from __future__ import annotations

import pytest

from treeattn.collectives import build, check
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.description import Cluster, Executor, Tier
from treeattn.collectives.clusters.levels import nested
from treeattn.collectives.clusters.placement import block, node_groups
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.schedule import Payload


def cluster(*joins, latencies=(1.0, 2.0, 20.0, 200.0)):
    names = ("node", "switch", "group", "world")
    tiers = tuple(
        Tier(name, count, latency, 0.1, 0.0, 10.0)
        for name, count, latency in zip(names, joins, latencies, strict=False)
    )
    return Cluster("made", "for tests", "node", tiers, {"e": Executor(0.0, 0.0, 10.0)}, "e")


@pytest.mark.parametrize(("joins", "ranks"), [((2, 3, 4), 24), ((2, 3, 4), 17), ((2, 2, 2, 2), 16)])
def test_nested_schemes_are_reductions_and_leave_the_outermost_links_alone(joins, ranks):
    machine = cluster(*joins)
    places = block(machine, ranks)
    groups = node_groups(machine, places)
    found = list(nested(machine, places))
    assert len(found) == 3
    for text, *_ in found:
        schedule = build(text, ranks, nodes=groups)
        assert check(schedule).determinism == "A"
        plain = build(text.partition(":")[0], ranks, nodes=groups)
        found, flat = (simulate(s, machine, places, Payload()) for s in (schedule, plain))
        assert found.traffic[-1].bytes < flat.traffic[-1].bytes


def test_packages_within_nodes_are_a_level_of_a_described_machine():
    machine = description.load("frontier")
    found = [one for one in nested(machine, block(machine, 32)) if one.tier == "package"]
    assert found[0].groups == tuple((rank, rank + 1) for rank in range(0, 32, 2))
    assert found[0].text == "hierarchical:outer=(hierarchical:nodes=4+4+4+4:outer=(recursive_doubling))"
    for one in found:
        assert check(build(one.text, 32, nodes=one.groups)).determinism == "A"


def test_groups_come_in_order_of_places():
    """As sizes of levels count them: by first ranks, the switches of these nodes would be mixed."""
    machine = cluster(2, 2, 2)
    places = (6, 7, 0, 1, 4, 5, 2, 3)
    assert node_groups(machine, places) == ((2, 3), (6, 7), (4, 5), (0, 1))
    schedule = build(next(nested(machine, places)).text, 8, nodes=node_groups(machine, places))
    assert simulate(schedule, machine, places, Payload()).traffic[-1].messages == 2
