"""Prices found again from what a machine of known prices would take, and files that hold them."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from statistics import median

import pytest
from msgspec import structs

from tests.support.drawn import sample
from treeattn.collectives import build, needs_nodes
from treeattn.collectives.clusters import description, uncertainty
from treeattn.collectives.clusters.description import Cluster, Executor, Protocol, Tier
from treeattn.collectives.clusters.fit import fit
from treeattn.collectives.clusters.placement import block, node_groups
from treeattn.collectives.clusters.probes import RECORDS, probes
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.clusters.writing import as_toml
from treeattn.collectives.traffic import Payload

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


def test_probes_keep_to_their_tier_and_use_a_rank_once():
    for nodes in (
        ((0, 1), (2, 3), (4, 5), (6, 7)),
        ((0, 1, 2, 3, 4), (5, 6)),
        ((0,), (1,), (2,)),
        ((0, 1, 2),),
    ):
        node_of = {rank: at for at, node in enumerate(nodes) for rank in node}
        found = list(probes(nodes))
        assert len(set(found)) == len(found)
        assert {probe.tier for probe in found} == {"", *(["network"] if len(nodes) > 1 else [])} | (
            {"node"} if max(map(len, nodes)) > 1 else set()
        )
        for probe in found:
            used = Counter(rank for group in probe.groups for rank in group)
            assert max(used.values(), default=1) == 1
            for group in probe.groups:
                assert len(group) > 1
                homes = {node_of[rank] for rank in group}
                assert len(homes) == (1 if probe.tier == "node" else len(group))


def worst(found, truth):
    """Of schemes at sizes that no probe has."""
    places, errors = block(truth, truth.places), []
    for scheme in ("hierarchical", "split_rail", "recursive_doubling", "ring", "k_nomial_tree", "bine"):
        nodes = groups(truth) if needs_nodes(scheme) else None
        schedule = build(scheme, truth.places, nodes=nodes)
        for records in (2, 8, 32, 128):
            assert records not in RECORDS
            times = [simulate(schedule, of, places, Payload(records, RECORD)).time for of in (found, truth)]
            errors.append(abs(times[0] / times[1] - 1))
    return max(errors)


@pytest.mark.parametrize(("nodes", "slots"), sample(1, [(4, 2), (2, 4), (3, 1)]))
def test_what_is_fitted_predicts_other_schemes_and_sizes(nodes, slots):
    truth = machine(nodes, slots)
    wanted = list(probes(groups(truth)))
    measured = {p: took(truth, p) for p in wanted}
    found, residuals, _ = fit(truth, block(truth, truth.places), RECORD, measured)
    assert max(abs(residual.error) for residual in residuals) < 0.1
    assert worst(found, truth) < 0.1


def test_a_few_wild_measurements_do_little():
    truth, draw = machine(), random.Random(1)
    measured = {p: took(truth, p) * draw.lognormvariate(0, 0.03) for p in probes(groups(truth))}
    for probe in draw.sample(list(measured)[1:], 4):
        measured[probe] *= 5
    found, residuals, _ = fit(truth, block(truth, truth.places), RECORD, measured)
    assert worst(found, truth) < 0.2
    assert sum(abs(residual.error) > 0.5 for residual in residuals) == 4


def test_what_a_fit_says_of_its_own_errors():
    """With noise of 10 % in what is measured: each kind of probe is left out once, and intervals of schemes
    and sizes that no probe had hold the truth about as often as they say."""
    truth, draw = machine(3, 2), random.Random(2)
    measured = {p: took(truth, p) * draw.lognormvariate(0, 0.1) for p in probes(groups(truth))}
    places = block(truth, truth.places)
    found, residuals, unseen = fit(truth, places, RECORD, measured)
    assert {one.probe for one in unseen} == {probe for probe in measured if probe.groups}
    fitted, told = (median(abs(one.error) for one in of) for of in (residuals, unseen))
    assert fitted < told < 0.3
    assert 0.07 < found.scatter < 0.3
    assert found.correlations["network.overhead"]["network.latency"] < -0.5
    clusters, held, errors = list(uncertainty.draws(found, 20)), [], []
    for scheme in ("hierarchical", "recursive_doubling", "ring", "k_nomial_tree"):
        schedule = build(scheme, truth.places, nodes=groups(truth) if needs_nodes(scheme) else None)
        for records in (2, 32, 128):
            payload = Payload(records, RECORD)
            true, mean, *drawn = (
                math.log(simulate(schedule, of, places, payload).time) for of in (truth, found, *clusters)
            )
            errors.append(statistics.stdev(drawn) / uncertainty.STEP)
            held.append(abs(true - mean) < 1.96 * errors[-1])
    assert sum(held) >= 0.75 * len(held), (held, errors)
    assert 0.02 < median(errors) < 0.2


def test_nothing_measured():
    with pytest.raises(ValueError, match="nothing"):
        fit(machine(), block(machine(), 8), RECORD, {})


@pytest.mark.parametrize("name", description.shipped())
def test_files_are_read_as_they_were_written(name, tmp_path):
    cluster = description.load(name)
    path = tmp_path / "again.toml"
    tier, *outer = cluster.tiers
    sure = structs.replace(tier, errors={"latency": 0.1})
    sides = {f"{tier.name}.latency": {f"{tier.name}.overhead": -0.5}}
    cluster = structs.replace(cluster, tiers=(sure, *outer), scatter=0.25, correlations=sides)
    path.write_text(as_toml(cluster, ["why", "and when"]))
    assert path.read_text().startswith("# why\n# and when\nname = ")
    assert description.load(path) == cluster


def test_numbers_keep_six_digits(tmp_path):
    path = tmp_path / "n.toml"
    path.write_text(as_toml(structs.replace(machine(), memory=1 / 3)))
    assert "memory = 0.333333\n" in path.read_text()
    assert description.load(path).memory == 0.333333
