"""Schedules searched for: what is found is proved, on the front, and no slower than what it came from."""

import pytest
from made_clusters import two_tiers

from treeattn.collectives import check
from treeattn.collectives.catalog import select
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.placement import block, cyclic, node_groups
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.clusters.synthesis import Machine, front, search
from treeattn.collectives.schedule import Payload


def machine(cluster=None, place=block, payload=None):
    payload = payload or Payload()
    cluster = cluster or two_tiers(4, 4, overhead=0.5, bandwidth=10.0)
    return Machine(cluster, place(cluster, cluster.places), payload)


def test_the_search_finds_nothing_slower_than_what_it_names():
    for payload in (Payload(1, 8), Payload(1024, 520)):
        here = machine(description.load("pcie-islands"), payload=payload)
        found, left = search(here)
        assert not left
        assert found == sorted(found, key=lambda one: one.criteria)
        nodes = node_groups(here.cluster, here.places)
        for text in ("recursive_doubling", "bine", "circulant", "hierarchical", "split_rail", "multi_leader"):
            asked = select(text)
            schedule = asked.build(16, nodes)
            assert found[0].time <= simulate(schedule, here.cluster, here.places, payload).time + 1e-9


def test_the_front_is_what_none_beats():
    names = {one.name: one for one in search(machine())[0]}
    best = front(names.values())
    assert [one.time for one in best] == sorted(one.time for one in best)
    for one in names.values():
        assert one in best or any(other.beats(one) or other.criteria == one.criteria for other in best)
    for one in best:
        assert not any(other.beats(one) for other in names.values())


def test_reordered_ranks_are_as_good_in_any_placement():
    """A tree on ranks that were dealt out, told where they are, is the tree on blocks."""
    blocks, dealt = ({one.name: one for one in search(machine(place=p))[0]} for p in (block, cyclic))
    name = select("k_nomial_tree:radix=4").text
    assert dealt[name].time > blocks[name].time
    assert dealt[f"{name}, reordered"].time == pytest.approx(blocks[f"{name}, reordered"].time)
    check(dealt[f"{name}, reordered"].schedule)
