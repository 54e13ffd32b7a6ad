"""How many threads a rank has, where several share the cores of a node."""

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
    """Give this rank its share of the node's cores, at least one: how many threads NumPy's linear algebra
    has then, or None where the environment or the library itself has decided. Our own kernels, planned from
    now on, take as many, unless ``TREEATTN_THREADS`` says otherwise. By itself NumPy takes all cores in every
    rank, and they wait for each other. Collective.

    Raises `BackendError` without the threadpoolctl library, where ranks share a node.
    """
    together = next(ranks for ranks in comm_.node_groups(comm) if comm.rank in ranks)
    share = max(1, len(os.sched_getaffinity(0)) // len(together))
    os.environ.setdefault("TREEATTN_THREADS", str(share))
    if any(name in os.environ for name in _SETTINGS) or len(together) == 1:
        return None
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        raise BackendError(
            f"{len(together)} ranks of a node would each take all of its cores: "
            "pip install 'treeattn[models]', or set OPENBLAS_NUM_THREADS"
        ) from None
    threadpool_limits(share)
    return share
