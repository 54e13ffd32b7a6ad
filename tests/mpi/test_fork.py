"""A forked process has no communicator, whatever its parent has made."""

from mpi4py import MPI

from tests.support import forked


def test_no_public_verb_serves_a_forked_process(comm):
    forked.check(comm, MPI.COMM_WORLD)
