"""Clusters for tests: two tiers with prices as a test wants them."""

from treeattn.collectives.clusters.description import Cluster, Executor, Protocol, Tier

FREE = 1e12  # GB/s: bytes cost nothing


def two_tiers(
    nodes=2, ranks=8, *, within=1.0, between=10.0, overhead=0.0, gap=0.0, bandwidth=FREE, cards=None, **more
):
    """`nodes` of `ranks`; latencies within and between them; `more` goes to both tiers."""
    prices = {"overhead": overhead, "gap": gap, "bandwidth": bandwidth, **more}
    tiers = (Tier("node", ranks, within, **prices), Tier("net", nodes, between, **prices))
    free = {"free": Executor(0.0, 0.0, FREE)}
    return Cluster("made", "for tests", "node", tiers, free, "free", cards or ranks)


def with_executor(cluster, **prices):
    """The same with one executor of these prices."""
    import msgspec

    executor = Executor(**{"call": 0.0, "round": 0.0, "merge_bandwidth": FREE} | prices)
    return msgspec.structs.replace(cluster, executors={"made": executor}, executor="made")


def rendezvous(size):
    """Messages of at least so many bytes wait for the receiver."""
    return (Protocol("rendezvous", size, 1.0, None, True),)
