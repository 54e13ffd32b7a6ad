"""The simulator against closed formulas, against counting, and against what cannot be."""

import json
from math import log2
from pathlib import Path

import numpy as np
import pytest
import second_opinion as opinion
from made_clusters import rendezvous, two_tiers, with_executor
from msgspec.structs import replace

from treeattn.collectives import Schedule, Transfer, build, names, needs_nodes
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.arrivals import arrivals
from treeattn.collectives.clusters.bound import spread
from treeattn.collectives.clusters.critical_path import assumed_share, critical_path, in_words
from treeattn.collectives.clusters.description import Executor, Protocol, Tier
from treeattn.collectives.clusters.placement import block, cyclic, node_groups, suited
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.schedule import Payload
from treeattn.errors import ArgumentError

G = 8
NODES = (1, 2, 8)
PAYLOAD = Payload(records=1024, record_bytes=8)
M = PAYLOAD.bytes

# Latency of a whole step where bytes and overheads cost nothing, a within and x between nodes (n nodes of
# 8); then messages within and between nodes, and bytes that the busiest card sends, where every rank has
# one. Source of the counts: the usual closed forms, as in Thakur, Rabenseifner, Gropp, IJHPCA 2005.
FORMULAS = {
    "chain": lambda n, a, x: (
        2 * n * (G - 1) * a + 2 * (n - 1) * x, 2 * n * (G - 1), 2 * (n - 1), M if n > 1 else 0,
    ),
    "k_nomial_tree": lambda n, a, x: (
        6 * a + 2 * log2(n) * x, 2 * n * (G - 1), 2 * (n - 1), log2(n) * M,
    ),
    "recursive_doubling": lambda n, a, x: (
        3 * a + log2(n) * x, 3 * n * G, n * G * log2(n), log2(n) * M,
    ),
    "reduce_scatter_gather": lambda n, a, x: (
        6 * a + 2 * log2(n) * x, 6 * n * G, 2 * n * G * log2(n), 2 * M * (1 - 1 / n),
    ),
    "reduce_scatter_gather:order=near": lambda n, a, x: (
        6 * a + 2 * log2(n) * x, 6 * n * G, 2 * n * G * log2(n), 2 * M / G * (1 - 1 / n),
    ),
    # 2 (p-1) hops around the ring, of which at most 2 n leave a node
    "ring": lambda n, a, x: (
        2 * (G - 1) * a if n == 1 else (2 * n * G - 2 - 2 * n) * a + 2 * n * x,
        2 * (n * G - 1) * (n * G - (n if n > 1 else 0)), 2 * n * (n * G - 1) if n > 1 else 0,
        2 * M * (n * G - 1) / (n * G) if n > 1 else 0,
    ),
    "hierarchical:inner=k_nomial_tree": lambda n, a, x: (
        6 * a + log2(n) * x, 2 * n * (G - 1), n * log2(n), log2(n) * M,
    ),
    "split_rail": lambda n, a, x: (
        2 * a + log2(n) * x, 2 * n * G * (G - 1), n * G * log2(n), log2(n) * M / G,
    ),
    "multi_leader:leaders=8": lambda n, a, x: (
        2 * a + log2(n) * x, 2 * n * G * (G - 1), n * G * log2(n), log2(n) * M / G,
    ),
    "uneven_nodes": lambda n, a, x: (
        2 * a + log2(n) * x, 2 * n * G * (G - 1), n * G * log2(n), log2(n) * M / G,
    ),
    "recursive_multiplying:factors=8+{n}": lambda n, a, x: (
        a + (x if n > 1 else 0), n * G * (G - 1), n * G * (n - 1), (n - 1) * M,
    ),
    "all_gather_merge": lambda n, a, x: (
        max(a, x) if n > 1 else a, n * G * (G - 1), n * G * (n - 1) * G, (n - 1) * G * M,
    ),
}  # fmt: skip


def placed(scheme, cluster, ranks, place=block):
    places = place(cluster, ranks)
    groups = node_groups(cluster, places)
    return build(scheme, ranks, nodes=groups if needs_nodes(scheme) else None), places


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("scheme", FORMULAS)
def test_closed_formulas(scheme, nodes):
    cluster = two_tiers(nodes, G, within=1.0, between=10.0)
    schedule, places = placed(scheme.format(n=nodes).removesuffix("+1"), cluster, nodes * G)
    found = simulate(schedule, cluster, places, PAYLOAD)
    wanted = FORMULAS[scheme](nodes, 1.0, 10.0)
    counted = (found.time, *(tier.messages for tier in found.traffic), found.max_nic_bytes)
    for value, closed in zip(counted, wanted, strict=True):
        if closed is not None:
            assert value == pytest.approx(closed), (counted, wanted)


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("scheme", names("schedule"))
def test_every_scheme_is_counted_bounded_and_explained(scheme, nodes):
    cluster = with_executor(
        two_tiers(nodes, G, overhead=0.3, gap=0.2, bandwidth=10.0, cards=2),
        call=2.0,
        round=0.5,
        merge_bandwidth=20.0,
    )
    schedule, places = placed(scheme, cluster, nodes * G)
    found = simulate(schedule, cluster, places, PAYLOAD)
    sent = list(schedule.traffic(PAYLOAD.records))
    between = [m for m in sent if m.src // G != m.dst // G]
    assert [t.messages for t in found.traffic] == [len(sent) - len(between), len(between)]
    assert sum(t.bytes for t in found.traffic) == sum(m.records for m in sent) * PAYLOAD.record_bytes
    assert found.bound <= found.time
    path = critical_path(found)
    assert sum(segment.microseconds for segment in path) == pytest.approx(found.time)
    assert in_words(path).startswith(f"{found.time:.1f} us: ")


def ping(size=1000, merge=True):
    return Schedule("ping", 2, 1, ((Transfer(0, 1, range(1), merge),),)), Payload(1, size)


def test_one_message_by_hand():
    cluster = with_executor(
        two_tiers(2, 1, between=3.0, overhead=0.5, gap=0.1, bandwidth=1.0),
        call=2.0, round=0.25, message=0.125, merge_bandwidth=10.0,
    )  # fmt: skip
    schedule, payload = ping()
    found = simulate(schedule, cluster, (0, 1), payload)
    # call, round, sender, under way, bytes at 1 GB/s, receiver, merge at 10 GB/s
    assert found.time == pytest.approx(2 + 0.25 + 0.625 + 3 + 1 + 0.625 + 0.1)
    kinds = [segment.kind for segment in critical_path(found)]
    sent, received = ["executor", "executor", "executor", "overhead"], ["executor", "overhead", "merge"]
    assert kinds == [*sent, "latency", "bytes", *received]


def test_executors_are_those_that_a_decoder_would_take():
    dgx, hdr = description.load("dgx-h100"), description.load("cpu-hdr200")
    node, nodes = range(8), range(16)
    assert dgx.executor_for(nodes) == dgx.executor_for(node) == "nccl"
    assert dgx.executor_for(node, "peer") == "peer"
    assert dgx.executor_for(nodes, "peer") == "peer_nccl"
    assert hdr.executor_for(node) == hdr.executor_for(nodes) == "slots"
    assert hdr.executor_for((0, 8, 16)) == "program"  # a rank a node shares no memory
    with pytest.raises(ArgumentError, match="executors: there is no 'nccl'; choose from"):
        hdr.executor_for(node, "nccl")


def test_what_comes_from_assumed_prices():
    cluster = two_tiers(1, 2, within=3.0, overhead=0.5, assumed=("latency",))
    cluster = with_executor(cluster, call=2.0, round=4.0, assumed=("round",))
    path = critical_path(simulate(ping()[0], cluster, (0, 1), ping()[1]))
    assert in_words(path) == "10.0 us: 6.0 executor*, 3.0 latency* (node 1), 1.0 overhead of messages"
    assert assumed_share(path) == pytest.approx(0.7)
    assert assumed_share(()) == 0


def star(leaves):
    return Schedule("star", leaves + 1, 1, (tuple(Transfer(r, 0) for r in range(1, leaves + 1)),))


def test_arrivals_queue_at_the_port_and_at_the_processor():
    payload = Payload(1, 1000)
    by_port = two_tiers(1, 4, within=1.0, bandwidth=1.0)
    assert simulate(star(3), by_port, (0, 1, 2, 3), payload).time == pytest.approx(1 + 3 * 1)
    by_processor = two_tiers(1, 4, within=1.0, overhead=2.0)
    assert simulate(star(3), by_processor, (0, 1, 2, 3), payload).time == pytest.approx(2 + 1 + 3 * 2)
    by_gap = two_tiers(1, 4, within=1.0, gap=5.0)
    assert simulate(star(3), by_gap, (0, 1, 2, 3), payload).time == pytest.approx(1 + 2 * 5)
    meshed = two_tiers(1, 4, within=1.0, bandwidth=1.0, mesh=True)
    assert simulate(star(3), meshed, (0, 1, 2, 3), payload).time == pytest.approx(1 + 1)


def test_ranks_of_a_node_share_its_cards():
    pairs = Schedule("pairs", 4, 1, (tuple(Transfer(r, r + 2, range(1), False) for r in range(2)),))
    for cards, last in ((2, 11.0), (1, 12.0)):
        cluster = two_tiers(2, 2, between=10.0, bandwidth=1.0, cards=cards)
        assert simulate(pairs, cluster, (0, 1, 2, 3), Payload(1, 1000)).time == pytest.approx(last)


def test_tapered_uplinks_are_shared():
    pairs = Schedule("pairs", 8, 1, (tuple(Transfer(r, r + 4) for r in range(4)),))
    free = two_tiers(2, 4, between=10.0, bandwidth=1.0)
    node, net = free.tiers
    tapered = replace(free, tiers=(node, replace(net, taper=4.0)))
    # Four messages of 1 microsecond share an uplink with the bandwidth of one card.
    assert simulate(pairs, free, tuple(range(8)), Payload(1, 1000)).time == pytest.approx(11)
    assert simulate(pairs, tapered, tuple(range(8)), Payload(1, 1000)).time == pytest.approx(14)
    # Of a single card an uplink has a quarter of the bandwidth, for one message too.
    one_card = replace(tapered, cards=1)
    one = Schedule("one", 5, 1, ((Transfer(0, 4),),))
    assert simulate(one, one_card, tuple(range(5)), Payload(1, 1000)).time == pytest.approx(14)
    # Further out an uplink is of two nodes and their eight cards: the last of four begins 1.5 later.
    wide = replace(free, tiers=(node, net, replace(net, name="world", taper=4.0)))
    far = Schedule("far", 12, 1, (tuple(Transfer(r, r + 8) for r in range(4)),))
    assert simulate(far, wide, tuple(range(12)), Payload(1, 1000)).time == pytest.approx(12.5)


def test_what_comes_from_outside_passes_the_uplink_before_the_card():
    """4 -> 1 waits for the uplink that 2 -> 0 has; 0 -> 1 comes meanwhile and finds the card of 1 free."""
    cluster = two_tiers(2, 1, between=10.0, bandwidth=1.0)
    node, net = cluster.tiers
    cluster = replace(cluster, tiers=(node, net, replace(net, name="world", joins=3, taper=4.0)))
    messages = tuple(Transfer(src, dst, range(1), False) for src, dst in ((2, 0), (4, 1), (0, 1)))
    schedule, late = Schedule("made", 6, 1, (messages,)), (0.5, *[0.0] * 5)
    found = simulate(schedule, cluster, tuple(range(6)), Payload(1, 1000), starts=late)
    assert {f.src: f.delivered for f in found.flights} == pytest.approx({2: 12.0, 4: 14.0, 0: 11.5})


def test_rendezvous_waits_for_the_receiver():
    schedule, payload = ping()
    for size, end in ((1001, 20.0), (1000, 21.0)):  # eager: it is there when the receiver begins at 20
        cluster = two_tiers(2, 1, between=1.0, protocols=rendezvous(size))
        found = simulate(schedule, cluster, (0, 1), payload, starts=(0.0, 20.0))
        assert found.time == pytest.approx(end)
        assert sum(s.microseconds for s in critical_path(found)) == pytest.approx(found.time)


def test_the_floor_spreads_news():
    assert spread(8, 1, 1.0, 1.0) == 3  # doubling
    assert spread(9, 8, 1.0, 1.0) == 1  # all at once
    assert spread(5, 1, 1.0, 3.0) == 6  # 1 at 3, 2 at 4, 3 at 5, 4 and 5 at 6
    assert simulate(build("chain", 1), two_tiers(1, 1), (0,)).bound == 0


@pytest.mark.parametrize(("result", "microseconds"), [("replicated", 1.0), ("root", 0.5)])
def test_the_floor_has_bytes_leave_the_nodes(result, microseconds):
    """Half of 1,000 bytes each of two, at 1 GB/s; and as many again where every rank ends with all."""
    cluster = two_tiers(2, 1, between=0.0, bandwidth=1.0)
    found = simulate(build("chain", 2, result=result), cluster, (0, 1), Payload(2, 500))
    assert found.bound == pytest.approx(microseconds)


def test_what_does_not_fit():
    cluster = two_tiers(2, 2)
    with pytest.raises(ArgumentError, match="3 places for 4 ranks"):
        simulate(build("chain", 4), cluster, (0, 1, 2))
    with pytest.raises(ArgumentError, match="'slow'; choose from free"):
        simulate(build("chain", 4), cluster, (0, 1, 2, 3), executor="slow")


def test_what_a_tier_shares_is_taken_one_after_the_other():
    """Four pairs at once: the last is through when all have been. Within nodes each has its own."""
    cluster = two_tiers(8, 2, within=1.0, between=10.0)
    node, net = cluster.tiers
    cluster = replace(cluster, tiers=(replace(node, shared_gap=3.0), replace(net, shared_bandwidth=1e-3)))
    pairs = tuple(Transfer(4 * pair, 4 * pair + 2, range(1), False) for pair in range(4))
    found = simulate(Schedule("pairs", 16, 1, (pairs,)), cluster, block(cluster, 16), Payload(1, 5))
    assert sorted(flight.delivered for flight in found.flights) == pytest.approx([15.0, 20.0, 25.0, 30.0])
    near = tuple(Transfer(2 * node, 2 * node + 1, range(1), False) for node in range(4))
    found = simulate(Schedule("near", 16, 1, (near,)), cluster, block(cluster, 16), Payload(1, 5))
    assert [flight.delivered for flight in found.flights] == pytest.approx([4.0] * 4)


def test_a_message_holds_no_port_while_it_waits_for_another():
    """0, 1 and 2 wait for the NIC of 4; 3 -> 7 uses none of what they wait for."""
    messages = tuple(Transfer(src, dst) for src, dst in ((0, 4), (1, 4), (2, 4), (3, 7)))
    schedule = Schedule("made", 8, 1, (messages,))
    for taper in (0.0, 1e-6):
        cluster = two_tiers(2, 4, between=1.0, bandwidth=1.0)
        node, net = cluster.tiers
        groups = Tier("group", 4, 1.0, 0.0, 0.0, 1.0)
        node = replace(node, joins=1)
        cluster = replace(cluster, tiers=(node, groups, replace(net, taper=taper)), node="node", cards=1)
        found = simulate(schedule, cluster, tuple(range(8)), Payload(1, 10_000))
        landed = {(flight.src, flight.dst): flight.delivered for flight in found.flights}
        assert landed[3, 7] == pytest.approx(11, abs=1e-3)
        assert landed[2, 4] == pytest.approx(31, abs=1e-3)


def test_a_sender_that_waits_for_its_receiver_does_not_begin_before_it():
    """The receiver of a long message is still merging when its sender is ready: it begins once that ends."""
    early, late = Transfer(2, 1), Transfer(3, 0, range(1), False)
    schedule = Schedule("made", 4, 1, ((early, late), (Transfer(0, 1, range(1), False),)))
    cluster = two_tiers(4, 1, between=1.0, protocols=(Protocol("long", 1, 1.0, None, True),))
    cluster = replace(cluster, executors={"free": Executor(0.0, 0.0, 1.0)})
    found = simulate(schedule, cluster, (0, 1, 2, 3), Payload(1, 100_000), starts=(0.0, 0.0, 0.0, 4.0))
    message = next(flight for flight in found.flights if flight.round == 1)
    assert message.delivered == pytest.approx(1 + 100 + 1)


ROOT = Path(__file__).resolve().parents[4]


def test_the_committed_results_are_within_the_bands_and_of_this_simulator():
    """Ours is computed anew: prices or rules that changed since need new results."""
    facts = json.loads((ROOT / "docs/results/second_opinion.json").read_text())
    assert facts["bands"] == [opinion.BAND_ALONE, opinion.BAND]
    assert len(facts["rows"]) >= 100
    for row in facts["rows"]:
        assert abs(row["difference"]) < (opinion.BAND if row["meet"] else opinion.BAND_ALONE), row
        assert opinion.ours(row["cluster"], row["ranks"], row["scheme"], row["bytes"] // 520).time == (
            pytest.approx(row["ours_us"])
        )


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


@pytest.mark.parametrize("text", ["random:100us", "exponential:0.1ms", "ascending:100us", "late:100us"])
def test_patterns_of_arrivals(text):
    pattern = arrivals(text)
    steps = np.array([pattern.starts(step, 50) for step in range(200)])
    assert steps.min() >= 0
    assert (steps == [pattern.starts(step, 50) for step in range(200)]).all()
    mean = {"random": 50, "exponential": 100, "ascending": 50, "late": 2}[pattern.pattern]
    assert steps.mean() == pytest.approx(mean, rel=0.1)
    if pattern.pattern == "late":
        assert (np.sort(steps)[:, -2:] == [0, 100]).all()
        assert len(set(steps.argmax(axis=1))) > 25
    else:
        assert pattern.drawn == (pattern.pattern != "ascending")
        assert steps.max() <= (100 if pattern.pattern != "exponential" else 3000)


def test_instants_of_each_rank():
    found = arrivals("0+20us+1ms")
    assert [found.starts(step, 3) for step in range(2)] == [[0.0, 20.0, 1000.0]] * 2
    with pytest.raises(ArgumentError, match="3 instants for 8 ranks"):
        found.check(8)


def test_a_late_rank_delays_the_step_and_an_early_one_does_not():
    cluster = with_executor(two_tiers(4, 2, within=1.0, between=10.0, bandwidth=1.0, cards=2), round=2.0)
    schedule, places = build("recursive_doubling", 8), tuple(range(8))
    together, late, all_late = (
        simulate(schedule, cluster, places, Payload(1, 1000), starts=starts).time
        for starts in (None, [0.0] * 7 + [50.0], [50.0] * 8)
    )
    assert late == pytest.approx(together + 50)
    assert all_late == pytest.approx(together)


@pytest.mark.parametrize("text", ["", "early:5us", "random", "random:5", "none.csv", "0+5", "5us"])
def test_words_that_cannot_be(text):
    with pytest.raises(ArgumentError):
        arrivals(text)
