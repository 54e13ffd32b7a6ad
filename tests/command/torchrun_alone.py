"""Ranks of torchrun that are in no process group, for test_torchrun.py."""

import subprocess
import sys

import pytest
from mpi4py import MPI

import treeattn
from tests.command.launch import mpiexec
from tests.support.public_verbs import VERBS, check_complete

ALONE = """
import numpy as np
import treeattn
from treeattn.mpi import launch
one = np.ones((1, 1, 1, 8), "f")
assert launch.launched_as()[1] == {ranks}, launch.launched()
assert treeattn.decode(one, one, one)[1].round(4) == np.float32(8**0.5 + np.log({ranks})).round(4)
"""
REMEDY = "torchrun started 2 processes.*: call torch.distributed.init_process_group first, or pass comm="

check_complete()
for call in VERBS.values():
    with pytest.raises(treeattn.BackendError, match=REMEDY):
        call()
    call(comm=MPI.COMM_SELF)
    with pytest.raises(treeattn.BackendError, match=REMEDY):
        call()  # now that MPI has started, too

# What a rank starts inherits its variables, and is no rank of torchrun.
python = sys.executable, "-c"
subprocess.run([*python, ALONE.format(ranks=1)], check=True)
subprocess.run([str(mpiexec()), "-n", "2", *python, ALONE.format(ranks=2)], check=True)
subprocess.run([str(mpiexec()), "-n", "1", *python, ALONE.format(ranks=1)], check=True)
