"""Places of ranks as a drawing, as levels, and as a cluster to simulate."""

import pytest
from msgspec import structs

from tests.support.machine import machine
from treeattn.collectives import build, check
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.description import Cluster, Executor, Tier
from treeattn.collectives.clusters.placement import explicit, groups, node_groups
from treeattn.errors import ArgumentError
from treeattn.mpi import topology
from treeattn.mpi.topology import Rank, Topology
from treeattn.study.fit import probes


def made(*nodes, nics=0):
    """Of each node the sockets that its ranks may run on; ranks are numbered node by node."""
    places = [(at, sockets) for at, node in enumerate(nodes) for sockets in node]
    return Topology(tuple(Rank(rank, node, sockets, nics) for rank, (node, sockets) in enumerate(places)))


def bound(*nodes, **more):
    """Of each node the socket that each of its ranks is bound to."""
    return made(*([(socket,) for socket in node] for node in nodes), **more)


def cluster_of(found):
    """With made-up prices."""
    levels, places = found.levels()
    tiers = tuple(Tier(name, joins, 1.0, 0.1, 0.0, 10.0) for name, joins in levels)
    return Cluster("made", "", "node", tiers, {"e": Executor(0.0, 0.0, 1.0)}, "e", cards=found.nics), places


UNEVEN = bound((0, 1, 0), (1, 1, 0, 0, 0))


def test_sockets_are_a_level_where_ranks_are_bound_to_several():
    assert UNEVEN.sockets == (((0, 2), (1,)), ((5, 6, 7), (3, 4)))
    assert UNEVEN.binding.startswith("sockets are a level")
    cluster, places = cluster_of(UNEVEN)
    assert [(tier.name, tier.joins) for tier in cluster.tiers] == [("socket", 3), ("node", 2), ("network", 2)]
    assert explicit(cluster, places) == places
    assert groups(cluster, places, 0) == ((0, 2), (1,), (5, 6, 7), (3, 4))
    assert node_groups(cluster, places) == UNEVEN.nodes == ((0, 1, 2), (3, 4, 5, 6, 7))


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
    cluster, places = cluster_of(found)
    assert "socket" not in [tier.name for tier in cluster.tiers]
    assert explicit(cluster, places) == places


def test_leaders_of_one_node_meet_before_those_of_several():
    """Ranks that are dealt out over nodes: sockets in order of their first ranks would mix the nodes."""
    ranks = tuple(Rank(rank, rank % 2, (rank // 2 % 2,)) for rank in range(8))
    sockets = groups(*cluster_of(Topology(ranks)), 0)
    assert sockets == ((0, 4), (2, 6), (1, 5), (3, 7))
    schedule = build("hierarchical:outer=(hierarchical:nodes=2+2)", 8, nodes=sockets)
    assert check(schedule).determinism == "A"
    across = [t for round_ in schedule.rounds for t in round_ if t.src % 2 != t.dst % 2]
    assert len(across) == 2


def test_a_cluster_with_sockets_takes_ranks_by_them():
    cluster = description.load("dual-socket")
    places = UNEVEN.places_on(cluster)
    assert groups(cluster, places, 0) == groups(*cluster_of(UNEVEN), 0)
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


def test_nics_are_counted_if_nodes_can_share_them_evenly():
    assert bound((0, 0), (0, 0), nics=2).nics == 2
    assert bound((0, 0, 0), (0, 0, 0), nics=2).nics == 1


def test_what_sysfs_says_of_this_process(tmp_path, monkeypatch):
    root = machine(tmp_path)
    for cores, sockets in (({0, 2}, (0,)), ({0, 1}, (0, 1)), ({0, 9}, ())):  # of core 9 nothing is said
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: cores)
        assert topology.sockets_of(root) == sockets


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
