"""Threads of a rank, where several ranks share the cores of a node."""

from __future__ import annotations

import os

from treeattn.errors import MissingPackageError
from treeattn.mpi.communicators import Agreement, MpiCommunicator

#: A site or a user that sets one of these has decided for NumPy; OURS is that of our own kernels.
_SETTINGS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
_OURS = "TREEATTN_THREADS"


class ThreadLimits:
    """Gives this rank's share of the node's cores, at least one, to NumPy's linear algebra and to our own
    kernels that are planned from now on. By itself NumPy takes all cores in every rank, and they wait for
    each other. The environment goes first, for our kernels too (``TREEATTN_THREADS``).

    blas_threads: of NumPy's library; None where the environment or the library itself has decided.
    Collective. Raises `BackendError`, on every rank, where ranks share a node and one of them has no
    threadpoolctl library.
    """

    def __init__(self, comm: MpiCommunicator) -> None:
        #: How many ranks of the job are on this node.
        self.ranks = ranks = len(next(one for one in comm.nodes if comm.rank in one))
        share = max(1, len(os.sched_getaffinity(0)) // ranks)
        self.blas_threads: int | None = None
        with Agreement(comm):
            if ranks > 1 and not any(name in os.environ for name in _SETTINGS):
                _limit(share, ranks)
                self.blas_threads = share
        os.environ.setdefault(_OURS, str(share))


def _limit(threads: int, ranks: int) -> None:
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        raise MissingPackageError(
            f"{ranks} ranks of a node would each take all of its cores: "
            "pip install 'treeattn[models]', or set OPENBLAS_NUM_THREADS"
        ) from None
    threadpool_limits(threads)
