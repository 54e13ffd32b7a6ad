"""A process that a rank forks: it is refused what is its parent's."""

from pathlib import Path

from tests.support.torchrun import needs_torch, torchrun

from .launch import run


def test_a_fork_before_the_first_call_over_mpi():
    run("-c", "from mpi4py import MPI; from tests.support import forked; forked.before_any_call()", ranks=2)


@needs_torch
def test_no_public_verb_serves_a_fork_of_a_rank_of_torchrun():
    """Nor before the first call over a group."""
    torchrun(Path(__file__).with_name("torchrun_fork.py"), ranks=2)
