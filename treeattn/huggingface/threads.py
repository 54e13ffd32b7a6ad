"""Threads of torch on ranks that share a machine: too many make a model many times slower."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

__all__ = ["warn_of_too_many"]


def warn_of_too_many(comm: Any) -> None:
    """Warn in a line where the ranks of this machine are not bound to processors of their own and have more
    threads than there are; torchrun gives each rank one, mpiexec as many as there are processors."""
    here = next(len(group) for group in comm.nodes if comm.rank in group)
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    bound = len(os.sched_getaffinity(0)) < cores
    if here > 1 and threads > 1 and not bound and here * threads > cores:
        warnings.warn(
            f"torch has {threads} threads on each of {here} ranks of this machine, which has {cores} "
            f"processors: set OMP_NUM_THREADS={max(1, cores // here)}",
            RuntimeWarning,
            stacklevel=3,
        )
