"""Who sits where."""

import pytest
from made_clusters import two_tiers

from treeattn.collectives import build
from treeattn.collectives.clusters.placement import block, cyclic, node_groups, suited
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.schedule import Payload
from treeattn.errors import ArgumentError

CLUSTER = two_tiers(4, 2)


def test_block_and_cyclic():
    assert block(CLUSTER, 5) == (0, 1, 2, 3, 4)
    assert cyclic(CLUSTER, 8) == (0, 2, 4, 6, 1, 3, 5, 7)
    assert cyclic(CLUSTER, 5) == (0, 2, 4, 1, 3)  # three nodes hold five ranks
    assert node_groups(CLUSTER, cyclic(CLUSTER, 5)) == ((0, 3), (1, 4), (2,))


def test_more_ranks_than_places():
    for place in (block, cyclic):
        with pytest.raises(ArgumentError, match=r"8 places, 2 \(node\) x 4 \(net\), for 9 ranks"):
            place(CLUSTER, 9)
    with pytest.raises(ArgumentError, match="for 9 ranks"):
        suited(CLUSTER, build("chain", 9))


@pytest.mark.parametrize(
    "scheme", ["reduce_scatter_gather", "ring", "k_nomial_tree", "double_binary_tree", "bine"]
)
def test_suited_is_a_permutation_and_keeps_partners_together(scheme):
    cluster = two_tiers(4, 4)
    schedule = build(scheme, 16)
    places = suited(cluster, schedule)
    assert sorted(places) == list(range(16))
    crossing = {
        where: simulate(schedule, cluster, p, Payload(16, 8)).traffic[1].messages
        for where, p in (("suited", places), ("cyclic", cyclic(cluster, 16)))
    }
    assert crossing["suited"] <= crossing["cyclic"]
