"""Prices found again from what a machine of known prices would take, and files that hold them."""

import itertools
import math
import random
import statistics
from statistics import median

import pytest
from msgspec import structs

from tests.support.drawn import FACTOR, sample
from treeattn.cli.calibrate import as_toml
from treeattn.collectives import build, needs_nodes
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.critical_path import cost
from treeattn.collectives.clusters.description import Cluster, Executor, Protocol, Tier
from treeattn.collectives.clusters.placement import block, node_groups
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.schedule import Payload
from treeattn.study.fit import RECORDS, fit, probes
from treeattn.study.intervals import estimates

RECORD = 520


def machine(nodes=4, ranks=2):
    steps = (Protocol("rendezvous", 16384, 70.0),)
    tiers = (
        Tier("node", ranks, 2.0, 0.5, 0.0, 6.0),
        Tier("network", nodes, 50.0, 4.0, 0.0, 0.12, protocols=steps),
    )
    return Cluster("made", "for tests", "node", tiers, {"mpi": Executor(20.0, 1.0, 3.0)}, "mpi")


def groups(cluster):
    return node_groups(cluster, block(cluster, cluster.places))


def took(cluster, probe):
    if not probe.groups:
        return cluster.executors[cluster.executor].call
    payload = Payload(probe.records, RECORD)
    places = block(cluster, cluster.places)
    return simulate(probe.schedule(cluster.places), cluster, places, payload).time


UNSEEN = ("hierarchical", "split_rail", "recursive_doubling", "ring", "k_nomial_tree", "bine")


def simulated(machine, scheme, payload):
    """On any cluster of the machine's shape."""
    places = block(machine, machine.places)
    schedule = build(scheme, machine.places, nodes=groups(machine) if needs_nodes(scheme) else None)
    return lambda of: simulate(schedule, of, places, payload)


@pytest.mark.parametrize(("nodes", "slots"), sample(1, [(4, 2), (2, 3), (2, 4), (3, 1)], seed=3))
@pytest.mark.slow
def test_what_is_fitted_predicts_other_schemes_and_sizes(nodes, slots):
    truth = machine(nodes, slots)
    wanted = list(probes(groups(truth)))
    measured = {p: took(truth, p) for p in wanted}
    found, _, _, residuals, _ = fit(truth, block(truth, truth.places), RECORD, measured)
    assert max(abs(residual.error) for residual in residuals) < 0.1
    for scheme, records in itertools.product(UNSEEN, (2, 8, 32, 128)):
        assert records not in RECORDS
        run = simulated(truth, scheme, Payload(records, RECORD))
        assert abs(run(found).time / run(truth).time - 1) < 0.1


def drawn(seed):
    """A machine of drawn prices, what its probes took, and how far measurements are from them."""
    draw = random.Random(seed)

    def factor():
        return draw.lognormvariate(0, 0.4)

    made, miss = machine(*draw.choice([(3, 2), (4, 2), (2, 4)])), draw.choice([0.06, 0.1])
    tiers = tuple(
        structs.replace(
            tier, latency=tier.latency * factor(), overhead=tier.overhead * factor(),
            bandwidth=tier.bandwidth * factor(), protocols=(),
        )
        for tier in made.tiers
    )  # fmt: skip
    prices = Executor(20 * factor(), factor(), 3 * factor())
    truth = structs.replace(made, tiers=tiers, executors={"mpi": prices})
    return truth, lambda time: time * draw.lognormvariate(0, miss)


@pytest.mark.slow
def test_intervals_hold_as_often_as_they_say():
    """Of times and of ratios of schemes and sizes that no probe had, on machines whose prices are known, with
    6 or 10 % in what is measured. They are wider than they need be, by twice: kinds of probes that were left
    out are harder to predict than schemes are by all of them."""
    times, ratios, far = [], [], []
    for seed in range(2 * FACTOR):
        truth, measure = drawn(seed)
        places = block(truth, truth.places)
        measured = {probe: measure(took(truth, probe)) for probe in probes(groups(truth))}
        found, _, _, residuals, unseen = fit(truth, places, RECORD, measured)
        assert {one.probe for one in unseen} == {probe for probe in measured if probe.groups}
        assert median(abs(one.error) for one in residuals) < median(abs(one.error) for one in unseen)
        assert 0.05 <= found.scatter < 0.2
        for records in (2, 32, 128):
            runs = [simulated(truth, scheme, Payload(records, RECORD)) for scheme in UNSEEN]
            each, costs = [measure(run(truth).time) for run in runs], [cost(run(found)) for run in runs]
            sure = estimates(found, costs)
            base = next(time for one, time in zip(sure, each, strict=True) if one.is_baseline)
            for one, time in zip(sure, each, strict=True):
                times.append(one.low <= time <= one.high)
                if not one.is_baseline:
                    ratio = time / base
                    ratios.append(one.ratio_low <= ratio <= one.ratio_high)
                    far.append(abs(math.log(ratio / one.ratio)) / math.log(one.ratio_high / one.ratio))
    assert statistics.fmean(times) >= 0.85
    assert statistics.fmean(ratios) >= 0.85
    assert 0.1 < median(far) < 0.35, "half of all would lie within 0.3 of the way to the end"


@pytest.mark.parametrize("name", description.shipped())
def test_files_are_read_as_they_were_written(name, tmp_path):
    cluster = description.load(name)
    path = tmp_path / "again.toml"
    tier, *outer = cluster.tiers
    unsure = structs.replace(tier, assumed=("latency",))
    cluster = structs.replace(cluster, tiers=(unsure, *outer), scatter=0.25)
    path.write_text(as_toml(cluster, ["why", "and when"]))
    assert path.read_text().startswith("# why\n# and when\nname = ")
    assert description.load(path) == cluster
