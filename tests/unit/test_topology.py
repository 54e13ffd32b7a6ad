"""Places of ranks as a drawing, as levels, and as a cluster to simulate."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import pytest
from msgspec import structs

from tests.support.machine import GPUS, machine
from treeattn import hardware
from treeattn.collectives import build, check
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.fit import probes
from treeattn.collectives.clusters.levels import nested
from treeattn.collectives.clusters.placement import explicit, groups, node_groups
from treeattn.errors import ArgumentError
from treeattn.mpi import topology
from treeattn.mpi.topology import Rank, Topology

PAGE = Path(__file__).parents[2] / "docs/topology.md"


def made(*nodes, cards=(), gpus=()):
    """Of each node the sockets that its ranks may run on; ranks are numbered node by node."""
    places = [(at, sockets) for at, node in enumerate(nodes) for sockets in node]
    return Topology(tuple(
        Rank(rank, f"cn{node}", node, sockets, sockets, 4, cards, gpus, {})
        for rank, (node, sockets) in enumerate(places)
    ))  # fmt: skip


def bound(*nodes, **more):
    """Of each node the socket that each of its ranks is bound to."""
    return made(*([(socket,) for socket in node] for node in nodes), **more)


UNEVEN = bound((0, 1, 0), (1, 1, 0, 0, 0))


def test_sockets_are_a_level_where_ranks_are_bound_to_several():
    assert UNEVEN.sockets == (((0, 2), (1,)), ((5, 6, 7), (3, 4)))
    assert UNEVEN.binding.startswith("sockets are a level")
    cluster, places = UNEVEN.cluster()
    assert [(tier.name, tier.joins) for tier in cluster.tiers] == [("socket", 3), ("node", 2), ("switch", 2)]
    assert explicit(cluster, places) == places
    assert groups(cluster, places, 0) == ((0, 2), (1,), (5, 6, 7), (3, 4))
    assert node_groups(cluster, places) == UNEVEN.nodes == ((0, 1, 2), (3, 4, 5, 6, 7))
    assert "2 x 2 x 3 ranks as detected, with the prices of dual-socket" in cluster.about


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (made([(0,), (0, 1), (1,)]), "not bound to one are ranks 1 (mpiexec"),
        (made([(0, 1)] * 12), "ranks 0, 1, 2, 3, 4, 5, 6, 7, .. (mpiexec"),
        (made([(), ()]), "does not say to which one cores belong"),
        (bound((0, 0, 0)), "one in each node"),
        (bound((0, 1), (0, 1)), "one for each rank"),
    ],
)
def test_sockets_are_no_level_and_why(found, words):
    assert found.sockets == ()
    assert found.binding.startswith("sockets are no level: ")
    assert words in found.binding
    cluster, places = found.cluster()
    assert "socket" not in [tier.name for tier in cluster.tiers]
    assert explicit(cluster, places) == places


@pytest.mark.parametrize("found", [UNEVEN, bound((0, 1, 0, 1)), bound((0, 0, 1, 1), (0, 0, 1, 1))])
def test_schemes_over_all_levels_are_reductions(found):
    """Of sockets, nodes and the network; uneven and out of order too."""
    cluster, places = found.cluster()
    by_socket = [one for one in nested(cluster, places) if one.tier == "socket"]
    assert [one.text.partition(":")[0] for one in by_socket] == ["hierarchical", "split_rail", "multi_leader"]
    for one in by_socket:
        schedule = build(one.text, len(places), nodes=one.groups)
        assert check(schedule).determinism == "A"
    sizes = [len(of_node) for of_node in found.sockets]
    assert ("nodes=" + "+".join(map(str, sizes)) in by_socket[0].text) == (len(sizes) > 1)


def test_the_scheme_over_sockets_is_named_where_a_name_says_it():
    in_order = bound((0, 0, 1), (0, 1, 1, 1))
    name = "hierarchical:outer=(hierarchical:nodes=2+2):nodes=2+1+1+3"
    assert in_order.over_sockets == name
    check(build(name, 7))
    assert bound((0, 0, 1, 1)).over_sockets == "hierarchical:nodes=2+2"
    assert UNEVEN.over_sockets == ""
    assert bound((0, 0)).over_sockets == ""


def test_leaders_of_one_node_meet_before_those_of_several():
    """Ranks that are dealt out over nodes: sockets in order of their first ranks would mix the nodes."""
    ranks = tuple(
        Rank(rank, "cn", rank % 2, (rank // 2 % 2,), (), 4, (), (), {}) for rank in range(8)
    )  # fmt: skip
    cluster, places = Topology(ranks).cluster()
    one = next(one for one in nested(cluster, places) if one.tier == "socket")
    assert one.groups == ((0, 4), (2, 6), (1, 5), (3, 7))
    schedule = build(one.text, 8, nodes=one.groups)
    across = [t for round_ in schedule.rounds for t in round_ if t.src % 2 != t.dst % 2]
    assert len(across) == 2


def test_a_cluster_with_sockets_takes_ranks_by_them():
    cluster = description.load("dual-socket")
    places = UNEVEN.places_on(cluster)
    assert groups(cluster, places, 0) == groups(*UNEVEN.cluster(), 0)
    inner, *outer = cluster.tiers
    flat = structs.replace(cluster, tiers=(structs.replace(inner, name="package"), *outer))
    assert node_groups(flat, UNEVEN.places_on(flat)) == UNEVEN.nodes
    assert UNEVEN.places_on(flat)[:3] == (0, 1, 2)  # a package is no socket
    one_node = structs.replace(cluster, tiers=(structs.replace(inner, joins=4), outer[0]))
    with pytest.raises(ArgumentError, match="for 9 ranks"):
        bound([0] * 9).places_on(one_node)


def test_nodes_that_do_not_fit_are_said():
    """Such as a file of four nodes for a job on one."""
    cluster = description.load("dgx-h100")
    wide = bound([0] * 9)
    assert wide.places_on(cluster) == tuple(range(9))
    assert "one after the other, which is not how this job has them (1 of up to 9)" in wide.misfit(cluster)
    assert UNEVEN.misfit(cluster) == ""


def test_network_cards_are_counted_if_nodes_can_share_them_evenly():
    two = ("mlx5_0", "mlx5_1")
    assert bound((0, 0), (0, 0), cards=two).cluster()[0].cards == 2
    assert bound((0, 0, 0), (0, 0, 0), cards=two).cluster()[0].cards == 1
    assert "2 cards a node" in bound((0, 0), (0, 0), cards=two).cluster()[0].about


DRAWING = """\
node 0  cn0
  socket 0    [0] [2]
    GPU 0     NVIDIA H100  (for 0 1 2)
    GPU 1     NVIDIA H100
    mlx5_0    InfiniBand, 400 Gb/sec (4X NDR)
  socket 1    [1]
    GPU 2     NVIDIA H100
    GPU 3     NVIDIA H100
    mlx5_1    InfiniBand, 400 Gb/sec (4X NDR)
  links    GPU 0   GPU 1   GPU 2   GPU 3  mlx5_0  mlx5_1
  GPU 0        -     PHB     SYS     SYS     PIX     SYS
  GPU 1      PHB       -     SYS     SYS     PHB     SYS
  GPU 2      SYS     SYS       -     PXB     SYS    NODE
  GPU 3      SYS     SYS     PXB       -     SYS    NODE"""


def test_the_drawing(tmp_path):
    devices = hardware.devices(machine(tmp_path))
    found = Topology(bound((0, 1, 0), gpus=(GPUS[0],)).ranks, (devices,))
    assert found.drawing() == DRAWING
    assert indent(DRAWING, "    ") in PAGE.read_text()
    loose = Topology(made([(0, 1)]).ranks, (devices,)).drawing()
    assert "  any socket  [0]" in loose
    assert "  socket 0\n    GPU 0" in loose


def test_probes_of_sockets_keep_to_them():
    socket_of = {rank: group for of_node in UNEVEN.sockets for group in of_node for rank in group}
    found = list(probes(UNEVEN.nodes, UNEVEN.sockets))
    assert {probe.tier for probe in found} == {"", "socket", "node", "network"}
    for probe in found:
        for group in probe.groups:
            homes = {socket_of[rank] for rank in group}
            nodes = {UNEVEN.ranks[rank].node for rank in group}
            assert len(homes) == (1 if probe.tier == "socket" else len(group))
            assert len(nodes) == (len(group) if probe.tier == "network" else 1)


def test_one_rule_names_the_cluster(monkeypatch):
    monkeypatch.delenv(topology.PRESET, raising=False)
    assert topology.described(None) is None
    monkeypatch.setenv(topology.PRESET, "lumi")
    by_variable, by_option = topology.described(None), topology.described("frontier")
    assert (by_variable.cluster.name, by_variable.by) == ("lumi", "TREEATTN_CLUSTER")
    assert (by_option.cluster.name, by_option.by) == ("frontier", "--cluster")
    assert by_variable.shown.startswith("lumi (TREEATTN_CLUSTER): ")
    assert by_option.shown.startswith("frontier: ")
