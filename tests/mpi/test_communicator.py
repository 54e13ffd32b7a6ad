"""Communicators of this package: MPI's, of which no blocking call is unwatched; and where their ranks are."""

import inspect
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from math import prod
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import treeattn
from tests.support.machine import CORES, machine
from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.mpi_communicator import MpiCommunicator
from treeattn.llama import Llama, Session
from treeattn.mpi import communicators
from treeattn.mpi.topology import detect

# Return without the other ranks, as the MPI standard has it.
LOCAL = {
    "Abort", "Ack_failed", "Call_errhandler", "Cart_map", "Compare", "Create_errhandler", "Create_from_group",
    "Create_keyval", "Delete_attr", "Free_keyval", "Graph_map", "Join", "Revoke", "f2py", "fromhandle",
    "fromint", "py2f", "toint",
}  # fmt: skip


def test_every_call_that_waits_for_other_ranks_is_watched():
    """What a later mpi4py adds is, too, unless its name says that it does not wait."""
    names = [n for n in dir(MPI.Intracomm) if not n.startswith("_") and callable(getattr(MPI.Intracomm, n))]
    prompt = ("I", "Get_", "Set_", "ib", "im", "ip", "ir", "is")  # Isend, Is_inter, isend, ..
    waits = {n for n in names if not n.startswith(prompt) and not n.endswith("_init")} - LOCAL
    assert waits >= {"Barrier", "barrier", "Dup", "Free", "Split", "Sendrecv", "recv", "bcast", "Alltoallw"}
    assert waits == {
        n for n in waits if inspect.getattr_static(MpiCommunicator, n) is vars(MpiCommunicator)[n]
    }


def test_communicators_made_of_a_watched_one_are_watched_and_know_their_ranks(comm):
    backwards = comm.Split(0, -comm.rank)
    group = comm.Get_group()
    made = [comm.Dup(), comm.dup(), comm.Clone(), comm.Create(group), backwards]
    made += [comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)]
    for other in made:
        assert isinstance(other, MpiCommunicator)
        ranks = [member.rank for member in other.members]
        assert ranks == other.allgather(MPI.COMM_WORLD.rank)
        assert sorted(rank for node in other.nodes for rank in node) == list(range(other.size))
        other.free()
    assert comm.Split(MPI.UNDEFINED) == MPI.COMM_NULL
    group.Free()


def test_a_callers_communicator_is_wrapped_once(comm):
    theirs = MPI.COMM_WORLD.Split(comm.rank % 2, comm.rank)
    watched = communicators.intracomm(theirs)
    assert communicators.intracomm(theirs) is watched is communicators.intracomm(watched)
    assert watched == theirs
    assert watched.nodes == tuple(
        tuple(rank for rank in range(theirs.size) if watched.members[rank].node == node)
        for node in dict.fromkeys(member.node for member in watched.members)
    )
    theirs.Free()


def sees(comm, says, call, late=None, watched=0, looks=None):
    """Whether the watchdog sees rank `watched` wait as `says` has it, in ``call(pause)``, where `pause` keeps
    rank `late`, the last one, until it has, or has looked so often."""
    late = comm.size - 1 if late is None else late
    seen, told, left = weakref.WeakKeyDictionary(), [], threading.Event()
    sign, limit = Path(comm.bcast(tempfile.mkdtemp())) / "seen", time.monotonic() + 60

    def pause():
        while comm.rank == late != watched and not sign.exists() and time.monotonic() < limit:
            time.sleep(0.001)

    def look():
        while not left.is_set() and len(told) != looks and not re.match(says, (told or [""])[-1]):
            told.append(": ".join(watchdog._stalled(seen) or ()))
            time.sleep(0.001)
        sign.touch()

    thread = threading.Thread(target=look if comm.rank == watched != late else tuple)
    thread.start()
    call(pause)
    left.set()
    thread.join()
    found = comm.bcast(bool(told and re.match(says, told[-1])), watched)
    if comm.rank == 0:
        shutil.rmtree(sign.parent)
    return found


def test_a_wait_says_which_call_was_made(comm, several):
    calls = {
        "allgather": lambda: comm.allgather(0),
        "Allreduce": lambda: comm.Allreduce(np.ones(1), np.ones(1)),
        "Waitall": lambda: comm._run("Waitall", MPI.Request.Waitall, [comm.Ibarrier()]),
    }
    for name, call in calls.items():
        assert sees(comm, f"{name}: the other ranks$", lambda pause, call=call: (pause(), call()))


def test_a_wait_says_what_it_is_for(comm, several):
    with watchdog.Activity("the outer work"), watchdog.Activity("the inner work", "rank 7"):
        assert sees(comm, "the inner work: rank 7$", lambda pause: (pause(), comm.Barrier()))
    assert sees(comm, "Barrier: the other ranks$", lambda pause: (pause(), comm.Barrier()))


@pytest.mark.parametrize(
    ("scheme", "groups", "says"),
    [
        ("binary_tree", 1, r"binary_tree, round \d: messages from rank \d"),
        ("binary_tree", 2, r"binary_tree, round \d: messages from rank \d"),
        ("recursive_doubling", 1, r"recursive_doubling, round \d: messages from rank \d"),
        *((name, 1, f"{name}: the other ranks") for name in ("mpi_allreduce", "kv_ring", "query_ring")),
        ("head_all_to_all", 1, "head_all_to_all: the other ranks"),
    ],
)
def test_a_step_and_a_plan_name_where_and_for_whom_they_wait(comm, several, scheme, groups, says):
    output = "heads" if scheme == "head_all_to_all" else "replicated"
    how = treeattn.Reduction(scheme, output=output, groups=groups)
    q, k = np.ones((1, 1, 8, 16), "f"), np.ones((1, 8, 8, 16), "f")
    shape = {"heads": 8, "kv_heads": 8, "head_dim": 16, "dtype": "float32", "scheme": how}
    with treeattn.Decoder(comm, **shape) as decoder:
        decoder(q, k, k)
        assert sees(comm, says, lambda pause: (pause(), decoder(q, k, k)))
    planned = "what all ranks plan together: the other ranks"
    assert sees(comm, planned, lambda pause: (pause(), treeattn.Decoder(comm, **shape).close()))


@pytest.mark.skipif(MPI.COMM_WORLD.size != 3, reason="who has the last token is known of three ranks")
@pytest.mark.parametrize(
    ("sharded", "late", "where", "says"),
    [
        (False, 2, "prompt", "what all ranks plan together: the other ranks"),
        (False, 2, "layer 0", "the prefill's ring: the blocks of rank "),
        (False, 0, "layer 2", "the prompt's last token: the other ranks"),
        (False, 0, "choice", "the token that rank 0 chooses: the other ranks"),
        (True, 2, "layer 0", "the model's sharded weights: the other ranks"),
        (True, 2, "step", "the model's sharded weights: the other ranks"),
    ],
)
def test_a_session_names_where_and_for_whom_it_waits(comm, written, sharded, late, where, says):
    model = Llama(written("tied"), comm if sharded else None)

    def write(pause):
        def reached(here):
            return pause() if here == where else None

        with Session(comm, model, list(range(40)), capacity=50) as session:
            reached("prompt")
            logits = session.prefill(lambda layer: reached(f"layer {layer}"))
            reached("choice")
            token = session.choose(logits)
            reached("step")
            session.step(token)

    assert sees(comm, says, write, late, 1)


def test_what_a_step_calls_is_not_counted_twice(comm):
    assert type(comm.unwatched) is MPI.Intracomm
    assert comm.unwatched == comm
    assert not sees(comm, ".+", lambda pause: (pause(), comm.unwatched.Barrier()), looks=20)


def test_a_limit_that_one_rank_cannot_read_is_told_by_all(comm, several, monkeypatch):
    last = comm.size - 1
    monkeypatch.setenv("TREEATTN_TIMEOUT", "soon" if comm.rank == last else "5")
    said = f"rank {last}: TREEATTN_TIMEOUT=soon: give a number of seconds, 0 for no limit"
    with pytest.raises(treeattn.ArgumentError, match=said):
        treeattn.Decoder(comm, heads=4, kv_heads=4, head_dim=16)


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
