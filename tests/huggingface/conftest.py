"""Tests inside a job of MPI, as those of tests/mpi: mpiexec -n N python -m mpi4py -m pytest --with-mpi -x
tests/huggingface

Apart from these, since every rank imports torch.
"""

from tests.mpi.conftest import *  # noqa: F403
