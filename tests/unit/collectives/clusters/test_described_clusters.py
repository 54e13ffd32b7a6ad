"""The shipped descriptions of clusters, simulated, against what was measured there."""

import re
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from tests.support.drawn import sample
from treeattn.collectives import build
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.critical_path import assumed_share, critical_path
from treeattn.collectives.clusters.placement import block, node_groups
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.schedule import Payload

NEAR = "reduce_scatter_gather:order=near"
# (scheme, ranks, one a node) -> bytes, up to 128 KiB and below the humps of 1 MiB -> microseconds, by PICO
# (docs/predicted.md): on Leonardo not in production, on LUMI in one group.
MEASURED = {
    "leonardo": {
        (NEAR, 1024): {16384: 52.992, 131072: 108.593},
        ("recursive_doubling", 1024): {256: 31.672, 2048: 40.441, 16384: 80.9245, 131072: 287.775},
        (NEAR, 512): {2048: 38.3735, 16384: 51.151, 131072: 105.807},
        ("recursive_doubling", 512): {256: 21.1325, 2048: 30.355, 16384: 70.8385, 131072: 263.99},
        (NEAR, 16): {256: 15.096, 2048: 17.475, 16384: 29.934, 131072: 71.4055},
        (NEAR, 4): {256: 7.309, 2048: 9.231, 16384: 18.8055, 131072: 46.989},
        (NEAR, 8): {256: 11.694, 2048: 14.079, 16384: 25.807, 131072: 61.569},
    },
    "lumi": {
        (NEAR, 16): {256: 25.559, 2048: 33.623, 8192: 58.3865, 65536: 68.9035},
        ("recursive_doubling", 16): {256: 17.925, 2048: 22.423, 8192: 27.653, 65536: 120.478},
        ("ring", 16): {256: 92.027, 2048: 97.007, 8192: 136.571, 65536: 159.148},
        (NEAR, 8): {256: 18.877, 2048: 43.524, 16384: 50.408, 131072: 97.729},
        ("recursive_doubling", 8): {256: 12.774, 2048: 16.703, 16384: 26.823, 131072: 165.973},
        ("ring", 8): {256: 43.073, 2048: 61.189, 16384: 69.3595, 131072: 112.439},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("system", "percent"), sample(1, [("leonardo", 7), ("lumi", 4)]))
def test_simulated_times_are_near_the_measured_ones(system, percent):
    """docs/topology.md shows these percentages."""
    cluster = description.load(system)
    errors = []
    for (scheme, ranks), times in MEASURED[system].items():
        schedule, places = build(scheme, ranks), block(cluster, ranks)
        for size, measured in times.items():
            found = simulate(schedule, cluster, places, Payload(size // 4, 4)).time
            errors.append(abs(found / measured - 1))
    assert round(100 * np.median(errors)) == percent
    assert np.quantile(errors, 0.9) < 0.3


# Four islands of four GPUs over PCIe: which scheme wins at which size, as b12x#139 measured it.

CLUSTER = description.load("pcie-islands")
PLACES = block(CLUSTER, 16)
STAR = "hierarchical:inner=(k_ary_tree:radix=4)"
RAILS = "split_rail"  # reduce-scatter in the island

# KB -> microseconds: NCCL, hierarchical, island reduce-scatter
ISLANDS = {14: (36.1, 18.2, 20.5), 57: (36.5, 30.4, 22.4), 115: (39.7, 46.8, 26.0)}


def microseconds(scheme, kilobytes, cluster=CLUSTER):
    schedule = build(scheme, 16, nodes=node_groups(CLUSTER, PLACES))
    return simulate(schedule, cluster, PLACES, Payload(1000, int(kilobytes))).time


def nccl(kilobytes):
    """Its ring over PCIe by its own prices (tuning.cc): 6.6 for the call, 30 hops of 1.0; and bytes at
    the rate of the two measurements that are furthest apart."""
    return 6.6 + 30 * 1.0 + kilobytes * (39.7 - 36.1) / (115 - 14)


@pytest.mark.parametrize("size", ISLANDS)
def test_the_ranking_of_every_size(size):
    predicted = nccl(size), microseconds(STAR, size), microseconds(RAILS, size)
    for one, other, most in zip(predicted, ISLANDS[size], (0.07, 0.04, 0.04), strict=True):
        assert one == pytest.approx(other, rel=most)
    ranking = sorted(range(3), key=ISLANDS[size].__getitem__)
    assert sorted(range(3), key=predicted.__getitem__) == ranking


# One-shot kernels of 512 bytes on 2, 4, 8 H100, without a graph: sgl-project/sglang#2904.
ONE_SHOT = {2: 3.7, 4: 4.8, 8: 5.9}


@pytest.mark.parametrize("ranks", ONE_SHOT)
def test_a_one_shot_kernel_takes_what_was_published(ranks):
    cluster = description.load("dgx-h100")
    found = simulate(build("all_gather_merge", ranks), cluster, tuple(range(ranks)), Payload(1, 512), "peer")
    assert found.time == pytest.approx(ONE_SHOT[ranks], rel=0.1)


PRICES = {
    "latency", "overhead", "gap", "bandwidth", "read_latency", "read_bandwidth", "taper", "shared_gap",
    "shared_bandwidth", "memory", "call", "round", "far_round", "message", "merge_bandwidth",
}  # fmt: skip


@pytest.mark.parametrize("name", description.shipped())
def test_every_price_has_a_source_or_is_assumed(name):
    """A source is a comment on its line; a price of nothing needs none."""
    text = (Path(description.__file__).parent / f"{name}.toml").read_text()
    assert "assumed" in text
    for table in re.split(r"^\[+[\w.]+\]+", text, flags=re.MULTILINE):
        assumed = " ".join(re.findall(r"^assumed = .*", table, re.MULTILINE))
        for field, price, source in re.findall(r"^(\w+) = ([\d.]+)[ \t]*(#?)", table, re.MULTILINE):
            if field in PRICES and float(price):
                assert source or f'"{field}"' in assumed, f"{field} = {price}"
        for of in re.findall(r"^protocols = .*(?:\n .*)*\n?.*", table, re.MULTILINE):
            assert "#" in of or '"protocols"' in assumed, of


def dearer(part, by):
    """A tier or an executor whose assumed prices are higher by a factor; rates are lower."""
    fields = {field: getattr(part, field) for field in part.assumed if field != "protocols"}
    rates = ("bandwidth", "read_bandwidth", "merge_bandwidth", "shared_bandwidth")
    return structs.replace(part, **{f: v / by if f in rates else v * by for f, v in fields.items()})


#: Percent of recursive doubling's time on up to 64 ranks. On cpu-hdr200 waits for ports shrink as others
#: grow, so that its path says 64.
ASSUMED = {
    "cpu-hdr200": 50, "dgx-h100": 0, "dual-4090": 98, "dual-socket": 100, "frontier": 80, "laptop": 67,
    "leonardo": 31, "leonardo-booster": 100, "lumi": 24, "mi300x": 52, "pcie-islands": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", description.shipped())
def test_the_share_of_assumed_prices(name):
    cluster = description.load(name)
    ranks, step = min(64, cluster.places), 1e-3
    schedule, places = build("recursive_doubling", ranks), block(cluster, ranks)
    wrong = structs.replace(
        cluster,
        tiers=tuple(dearer(tier, 1 + step) for tier in cluster.tiers),
        executors={of: dearer(executor, 1 + step) for of, executor in cluster.executors.items()},
    )
    found = simulate(schedule, cluster, places)
    share = (simulate(schedule, wrong, places).time / found.time - 1) / step
    assert round(100 * share) == ASSUMED[name]
    along = 0.64 if name == "cpu-hdr200" else share
    assert assumed_share(critical_path(found)) == pytest.approx(along, abs=0.02)
