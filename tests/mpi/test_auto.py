"""Where ranks are, and a scheme that is chosen for them."""

from __future__ import annotations

import os

import numpy as np
import pytest
from mpi4py import MPI

import treeattn
from tests.support.machine import CORES, GPUS, machine
from treeattn import communicators
from treeattn.collectives import build, check
from treeattn.collectives.catalog import select
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.description import as_toml
from treeattn.collectives.clusters.levels import nested
from treeattn.collectives.clusters.placement import explicit
from treeattn.collectives.traffic import Payload
from treeattn.decoder import fastest
from treeattn.decoder.request import auto_selection
from treeattn.study import calibration
from treeattn.topology import detect

pytestmark = pytest.mark.mpi


def test_every_rank_finds_the_same_places(comm):
    found = detect(comm)
    assert len(set(comm.allgather(repr(found)))) == 1
    assert [rank.rank for rank in found.ranks] == list(range(comm.size))
    assert found.nodes == communicators.node_groups(comm)
    drawn = found.drawing()
    assert all(f"[{rank}]" in drawn for rank in range(comm.size))
    cluster, places = found.cluster()
    assert explicit(cluster, places) == places
    for node in found.nodes:
        assert len({places[rank] // cluster.slots for rank in node}) == 1


def problem(comm):
    rng = np.random.default_rng(7)
    q = rng.standard_normal((1, 1, 4, 8), np.float32)
    k, v = (rng.standard_normal((1, 6 * comm.size, 2, 8), np.float32) for _ in range(2))
    mine = slice(6 * comm.rank, 6 * comm.rank + 6)
    return q, k[:, mine], v[:, mine]


def test_auto_gives_the_result_and_says_why(comm):
    q, k, v = problem(comm)
    wanted, _ = treeattn.decode(q, k, v, comm=comm, scheme="recursive_doubling")
    with treeattn.Decoder(comm, heads=4, kv_heads=2, head_dim=8, dtype="float32", scheme="auto") as decoder:
        out, _ = decoder(q, k, v)
        assert np.allclose(out, wanted, atol=1e-6)
        assert len(set(comm.allgather(out.tobytes()))) == 1
        assert len(set(comm.allgather(decoder.why))) == 1
        assert decoder.why.startswith(decoder.schedule.name.partition(":")[0])
        check(decoder.schedule)
    with treeattn.Decoder(comm, heads=4, kv_heads=2, head_dim=8, dtype="float32") as decoder:
        assert decoder.why is None


def test_merging_takes_auto_too(comm):
    q, k, v = problem(comm)
    out, lse = treeattn.decode(q, k, v, comm=MPI.COMM_SELF)
    lse = lse.transpose(0, 2, 1)
    wanted, _ = treeattn.merge(out, lse, comm=comm, scheme="recursive_doubling")
    found, _ = treeattn.merge(out, lse, comm=comm, scheme="auto:cluster=frontier")
    assert np.allclose(found, wanted, atol=1e-6)


def test_the_machine_that_is_named_decides(comm, monkeypatch):
    small, large = Payload(1, 8), Payload(4096, 4096)
    asked = auto_selection("auto:cluster=leonardo")
    assert "on leonardo (" in fastest.choose(comm, asked, small).why
    if comm.size >= 8:
        names = [fastest.choose(comm, asked, payload).schedule.name for payload in (small, large)]
        assert names[0] != names[1]
    monkeypatch.setenv("TREEATTN_CLUSTER", "lumi")
    assert "on lumi (" in fastest.choose(comm, auto_selection("auto"), small).why
    monkeypatch.delenv("TREEATTN_CLUSTER")
    assert "on detected (" in fastest.choose(comm, auto_selection("auto"), small).why


def test_the_choice_is_the_least_of_its_candidates(comm):
    cluster, places = detect(comm).cluster()
    payload = Payload(16, 520)
    chosen = fastest.choose(comm, auto_selection("auto"), payload).schedule
    nodes = communicators.node_groups(comm)
    for text in ("k_nomial_tree", "recursive_doubling", "hierarchical", "split_rail"):
        other = build(text, comm.size, nodes=nodes if select(text).needs_nodes else None)
        times = [fastest.simulate(schedule, cluster, places, payload).time for schedule in (chosen, other)]
        assert times[0] <= times[1]


@pytest.mark.parametrize(
    ("scheme", "error", "words"),
    [
        ("auto:cluster=nowhere", treeattn.ArgumentError, "no such cluster"),
        ("auto:cluster=none.toml", treeattn.ArgumentError, "cannot be read"),
        ("auto:speed=11", treeattn.ScheduleError, "auto takes cluster=NAME"),
        ("auto:cluster=", treeattn.ScheduleError, "auto takes cluster=NAME"),
    ],
)
def test_what_auto_refuses_on_every_rank(comm, scheme, error, words):
    q, k, v = problem(comm)
    with pytest.raises(error, match=words):
        treeattn.decode(q, k, v, comm=comm, scheme=scheme)
    comm.Barrier()


def test_more_ranks_than_places(comm):
    if comm.size < 3:
        pytest.skip("dual-4090 has two places")
    with pytest.raises(treeattn.ArgumentError, match="has 2 places"):
        fastest.choose(comm, auto_selection("auto:cluster=dual-4090"), Payload())
    comm.Barrier()


SOCKETS_SHARE_A_BUS = """
name = "bus"
about = "two sockets, one message between them at a time"
node = "node"
executor = "program"
executors.program = { call = 0.0, round = 0.0, merge_bandwidth = 10.0 }
[[tiers]]
name = "socket"
joins = 8
latency = 1.0
overhead = 0.1
gap = 0.0
bandwidth = 10.0
[[tiers]]
name = "node"
joins = 2
latency = 1.0
overhead = 0.1
gap = 0.0
bandwidth = 10.0
shared_gap = 1000.0
"""


@pytest.fixture
def on_sockets(comm, tmp_path):
    """Ranks bound to the sockets of a machine in a folder, in turn."""
    usable = os.sched_getaffinity(0)
    if not {CORES[0][0], CORES[1][0]} <= usable:
        pytest.skip("needs cores 0 and 1")
    os.sched_setaffinity(0, {CORES[comm.rank % 2][0]})
    try:
        return detect(comm, devices=True, root=machine(tmp_path))
    finally:
        os.sched_setaffinity(0, usable)


def test_sockets_that_ranks_are_bound_to(comm, on_sockets):
    assert [rank.socket for rank in on_sockets.ranks] == [rank % 2 for rank in range(comm.size)]
    assert all(rank.cards == ("mlx5_0", "mlx5_1") for rank in on_sockets.ranks)
    assert [gpu.address for gpu in on_sockets.devices[0].gpus] == GPUS
    if comm.size > 2 and len(on_sockets.nodes) == 1:
        halves = tuple(range(0, comm.size, 2)), tuple(range(1, comm.size, 2))
        assert on_sockets.sockets == (halves,)
    drawn = on_sockets.drawing()
    assert "  socket 0    [0]" in drawn
    assert "GPU 3" in drawn


def test_schemes_over_sockets_give_the_result(comm, on_sockets):
    q, k, v = problem(comm)
    wanted, _ = treeattn.decode(q, k, v, comm=comm, scheme="recursive_doubling")
    for one in nested(*on_sockets.cluster()):
        schedule = build(one.text, comm.size, nodes=one.groups)
        out, _ = treeattn.decode(q, k, v, comm=comm, scheme=schedule)
        assert np.allclose(out, wanted, atol=1e-6)
        assert len(set(comm.allgather(out.tobytes()))) == 1


def test_auto_says_that_ranks_are_not_bound(comm, tmp_path, monkeypatch):
    if not {CORES[0][0], CORES[1][0]} <= os.sched_getaffinity(0):
        pytest.skip("needs cores 0 and 1")
    found = detect(comm, root=machine(tmp_path))
    assert found.sockets == ()
    monkeypatch.setattr(fastest.topology, "detect", lambda _: found)
    monkeypatch.delenv("TREEATTN_CLUSTER", raising=False)
    assert "not bound to one are ranks 0" in fastest.choose(comm, auto_selection("auto"), Payload()).why


@pytest.mark.slow
def test_calibrate_measures_sockets_apart(comm, on_sockets, tmp_path, monkeypatch):
    if comm.size < 3 or len(on_sockets.nodes) > 1:
        pytest.skip("three ranks of a node share two sockets")
    monkeypatch.setattr(calibration.topology, "detect", lambda _: on_sockets)
    found = calibration.calibrate(comm, "made", "mpi", 1.0, lambda _: None)
    if comm.rank == 0:
        assert [tier.name for tier in found.cluster.tiers] == ["socket", "node"]
        assert {one.probe.tier for one in found.residuals} == {"", "socket", "node"}
        path = tmp_path / "made.toml"
        path.write_text(as_toml(found.cluster))
        assert on_sockets.places_on(description.load(path)) == found.places
    comm.Barrier()


def test_auto_takes_sockets_for_a_level(comm, on_sockets, tmp_path, monkeypatch):
    path = tmp_path / "bus.toml"
    path.write_text(SOCKETS_SHARE_A_BUS)
    monkeypatch.setattr(fastest.topology, "detect", lambda _: on_sockets)
    chosen = fastest.choose(comm, auto_selection(f"auto:cluster={path}"), Payload(16, 520))
    check(chosen.schedule)
    assert len(set(comm.allgather(chosen.schedule))) == 1
    assert "named by auto:cluster=" in chosen.why
    if comm.size > 3 and len(on_sockets.nodes) == 1:
        assert "over each socket" in chosen.why.partition(";")[0]
        between = [t for round_ in chosen.schedule.rounds for t in round_ if t.src % 2 != t.dst % 2]
        assert len(between) == 2
