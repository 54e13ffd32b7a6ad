"""Where ranks are, and schemes over their sockets."""

import os
from math import prod

import pytest

from tests.support.machine import CORES, machine
from treeattn.mpi.topology import detect


def test_every_rank_finds_the_same_places(comm):
    found = detect(comm)
    assert len(set(comm.allgather(repr(found)))) == 1
    assert [rank.rank for rank in found.ranks] == list(range(comm.size))
    assert found.nodes == comm.nodes
    levels, places = found.levels()
    slots = prod(joins for name, joins in levels if name != "network")
    assert len(set(places)) == comm.size
    for node in found.nodes:
        assert len({places[rank] // slots for rank in node}) == 1


@pytest.fixture
def on_sockets(comm, tmp_path):
    """Ranks bound to the sockets of a machine in a folder, in turn."""
    usable = os.sched_getaffinity(0)
    if not {CORES[0][0], CORES[1][0]} <= usable:
        pytest.skip("needs cores 0 and 1")
    os.sched_setaffinity(0, {CORES[comm.rank % 2][0]})
    try:
        return detect(comm, machine(tmp_path))
    finally:
        os.sched_setaffinity(0, usable)


def test_sockets_that_ranks_are_bound_to(comm, on_sockets):
    assert [rank.socket for rank in on_sockets.ranks] == [rank % 2 for rank in range(comm.size)]
    assert all(rank.nics == 2 for rank in on_sockets.ranks)
    if comm.size > 2 and len(on_sockets.nodes) == 1:
        halves = tuple(range(0, comm.size, 2)), tuple(range(1, comm.size, 2))
        assert on_sockets.sockets == (halves,)
