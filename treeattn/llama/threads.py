"""How many threads NumPy's linear algebra has, where several ranks share the cores of a node."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from treeattn import comm as comm_
from treeattn.errors import BackendError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["share_cores"]

#: A site or a user that sets one of these has decided.
_SETTINGS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


def share_cores(comm: Intracomm) -> int | None:
    """Give this rank's linear algebra its share of the node's cores, at least one: how many, or None where
    the environment has decided. By itself every rank takes all of them, and they wait for each other.
    Collective.

    Raises `BackendError` without the threadpoolctl library, where ranks share a node.
    """
    together = next(ranks for ranks in comm_.node_groups(comm) if comm.rank in ranks)
    if any(name in os.environ for name in _SETTINGS) or len(together) == 1:
        return None
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        raise BackendError(
            f"{len(together)} ranks of a node would each take all of its cores: "
            "pip install 'treeattn[models]', or set OPENBLAS_NUM_THREADS"
        ) from None
    share = max(1, len(os.sched_getaffinity(0)) // len(together))
    threadpool_limits(share)
    return share
