"""Tests inside a job of MPI, as those of tests/mpi, or inside one of torchrun, and then without MPI:

mpiexec -n N python -m mpi4py -m pytest --with-mpi -x tests/huggingface
torchrun --standalone --nproc-per-node N -m pytest -p no:pytest_mpi -x tests/huggingface

Apart from those of tests/mpi, since every rank imports torch.
"""

import os

if "TORCHELASTIC_RUN_ID" in os.environ:
    from tests.support.torch_job import *  # noqa: F403
else:
    from tests.mpi.conftest import *  # noqa: F403
