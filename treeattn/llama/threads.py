"""How many threads a rank has, where several share the cores of a node."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from treeattn import comm as comm_
from treeattn.errors import BackendError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["CoreShare"]

#: A site or a user that sets one of these has decided for NumPy; OURS is that of our own kernels.
_SETTINGS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
_OURS = "TREEATTN_THREADS"


class CoreShare:
    """This rank's share of the node's cores, at least one, given to NumPy's linear algebra and to our own
    kernels that are planned from now on, until `give_back`. By itself NumPy takes all cores in every rank,
    and they wait for each other.

    blas_threads: of NumPy's library; None where the environment or the library itself has decided. The
    environment goes first for our kernels too (``TREEATTN_THREADS``).
    """

    def __init__(self, comm: Intracomm) -> None:
        """Collective. Raises `BackendError`, on every rank, where ranks share a node and one of them has no
        threadpoolctl library."""
        together = next(ranks for ranks in comm_.node_groups(comm) if comm.rank in ranks)
        self.blas_threads: int | None = None
        self._limits: Any = None
        share = max(1, len(os.sched_getaffinity(0)) // len(together))
        with comm_.Agreement(comm):
            if len(together) > 1 and not any(name in os.environ for name in _SETTINGS):
                self._limits, self.blas_threads = _limited(share, len(together)), share
        self._set = _OURS not in os.environ
        os.environ.setdefault(_OURS, str(share))

    def give_back(self) -> None:
        """All is as it was."""
        if self._limits is not None:
            self._limits.restore_original_limits()
        if self._set:
            os.environ.pop(_OURS, None)


def _limited(threads: int, ranks: int) -> Any:
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        raise BackendError(
            f"{ranks} ranks of a node would each take all of its cores: "
            "pip install 'treeattn[models]', or set OPENBLAS_NUM_THREADS"
        ) from None
    return threadpool_limits(threads)
