"""A process that a rank forks: it is refused what is its parent's."""

from pathlib import Path

from tests.support.torchrun import needs_torch, torchrun

from .launch import run

HERE = Path(__file__).parent

FORKS = """
import os, signal, sys
import numpy as np
import treeattn
{start}
one = np.ones((1, 1, 1, 8), "f")
child = os.fork()
if child == 0:
    signal.alarm(60)
    try:
        treeattn.decode(one, one, one)
    except treeattn.StateError:
        os._exit(7)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert treeattn.decode(one, one, one)[0].mean() == 1
"""


def test_a_fork_before_the_first_call_over_mpi():
    run("-c", FORKS.format(start="from mpi4py import MPI"), ranks=2)


@needs_torch
def test_a_fork_before_the_first_call_over_a_group(tmp_path):
    start = "import torch.distributed as dist; dist.init_process_group('gloo')"
    (tmp_path / "forks.py").write_text(FORKS.format(start=start))
    torchrun(tmp_path / "forks.py", ranks=2)


@needs_torch
def test_no_public_verb_serves_a_fork_of_a_rank_of_torchrun():
    torchrun(HERE / "torchrun_fork.py", ranks=2)
