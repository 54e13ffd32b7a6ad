"""Communicators of this package: MPI's, of which no blocking call is unwatched."""

from __future__ import annotations

import inspect
import shutil
import tempfile
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.mpi_communicator import MpiCommunicator
from treeattn.mpi import communicators

pytestmark = pytest.mark.mpi

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


def waiting_for(comm, call, looks=None):
    """What the watchdog sees while rank 0 is in a call for which the last rank comes when the others have
    been seen to wait, or after so many looks."""
    folder = Path(comm.bcast(tempfile.mkdtemp()))
    if comm.rank == comm.size - 1:
        while len(list(folder.iterdir())) < comm.size - 1:
            time.sleep(0.001)
        call()
        shutil.rmtree(folder)
        return None
    seen, told = weakref.WeakKeyDictionary(), []

    def look():
        while len(told) != looks and not any(told):
            told.append(watchdog._stalled(seen))
            time.sleep(0.001)
        (folder / str(comm.rank)).touch()

    thread = threading.Thread(target=look)
    thread.start()
    call()
    thread.join()
    return next(filter(None, told), None)


def test_a_wait_says_which_call_was_made(comm):
    calls = {
        "allgather": lambda: comm.allgather(0),
        "Allreduce": lambda: comm.Allreduce(np.ones(1), np.ones(1)),
        "Waitall": lambda: comm._run("Waitall", MPI.Request.Waitall, [comm.Ibarrier()]),
    }
    for name, call in calls.items():
        told = waiting_for(comm, call)
        assert told == (None if comm.rank == comm.size - 1 else (name, "the other ranks"))


def test_a_wait_says_what_it_is_for(comm):
    with watchdog.Activity("the outer work"), watchdog.Activity("the inner work", "rank 7"):
        told = waiting_for(comm, comm.Barrier)
    assert told == (None if comm.rank == comm.size - 1 else ("the inner work", "rank 7"))
    assert watchdog.current_activity() is None


def test_what_a_step_calls_is_not_counted_twice(comm):
    assert type(comm.unwatched) is MPI.Intracomm
    assert comm.unwatched == comm
    assert waiting_for(comm, comm.unwatched.Barrier, looks=20) is None


def test_ranks_that_sleep_in_a_barrier_are_not_late(comm):
    assert waiting_for(comm, comm.barrier_asleep, looks=20) is None
    comm.Barrier()
    time.sleep(0.02 if comm.rank == 0 else 0)
    came = time.monotonic_ns()
    comm.barrier_asleep()
    assert time.monotonic_ns() >= max(comm.allgather(came))
