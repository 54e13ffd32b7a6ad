"""Models of transformers on ranks that torchrun has started: a program of test_torchrun_models.py."""

from __future__ import annotations

import sys
import tempfile

import torch.distributed as dist

from tests.support.sharded_models import check_family, check_tensor_parallel
from tests.support.tiny_models import made, prompt
from tests.support.torchrun import without_mpi
from treeattn import communicators


def main() -> None:
    dist.init_process_group("gloo")
    comm = communicators.intracomm(None)
    if comm.rank == 0:  # what a rank has whole it attends to alone: no other has to take part in its group
        made("Llama", "treeattn")(prompt(), use_cache=False)
    for family in sys.argv[1:]:
        check_family(comm, family)
    if comm.size == 2:
        with tempfile.TemporaryDirectory() as folder:
            check_tensor_parallel(comm, "Llama", comm.bcast(folder))
            comm.barrier()
    without_mpi()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
