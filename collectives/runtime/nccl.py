"""NCCL by way of CuPy: messages and sums from GPU to GPU, queued to a stream.

CuPy is imported when this is first used. NCCL itself comes with treeattn[nccl12] or treeattn[nccl13].
"""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.memory import Array, PeerArray, Stream
from treeattn.errors import PeerError, TransportError

if TYPE_CHECKING:
    from treeattn.collectives.runtime import communicator

#: NCCL's own variable: whether several ranks may have one GPU; and the first version that knows it.
_SHARING, _SHARING_SINCE = "NCCL_MULTI_RANK_GPU_ENABLE", (2, 30)


@functools.cache
def problem() -> str | None:
    """Why NCCL cannot be used here, in one line with the remedy; None where it can."""
    try:
        _library()
    except TransportError as error:
        return str(error)
    return None


def version() -> tuple[int, int]:
    """NCCL's version, such as (2, 30), where there is no `problem`."""
    code = int(_library().get_version())
    return code // 10000, code // 100 % 100  # as NCCL writes it from 2.9 on; older ones come out below


def sharing_problem() -> str | None:
    """Why no two ranks can have one GPU here, with the remedy; None where NCCL lets them.

    Ranks that each have another ``NCCL_HOSTID`` NCCL takes for ranks of other hosts, of any version: it looks
    for no GPU that stands twice, and goes by sockets. That is for tests.
    """
    if os.environ.get("NCCL_HOSTID"):
        return None
    found = version()
    if found < _SHARING_SINCE:
        return (
            f"NCCL {found[0]}.{found[1]} needs one for each: install NCCL 2.30 or newer and set {_SHARING}=1"
        )
    if os.environ.get(_SHARING) != "1":
        return (
            f"NCCL lets them only where {_SHARING}=1 is set for every rank (experimental; with "
            "NCCL_NVLS_ENABLE=0 and a small NCCL_MAX_CTAS, so that the kernels of all fit)"
        )
    return None


@functools.cache
def _library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns of what is reported here
        try:
            from cupy.cuda import nccl
        except ImportError as error:
            raise TransportError(f"NCCL is reached through CuPy, which does not load: {error}") from error
    if not nccl.available:
        raise TransportError(
            "no NCCL: install treeattn[nccl12] or treeattn[nccl13], whichever CUDA CuPy is built for, "
            "or take transport='host'"
        )
    return nccl


class NcclCommunicator:
    """Ranks that exchange float32 arrays. All calls but the last three are queued, not waited for."""

    def __init__(self, comm: communicator.Communicator, stream: Stream) -> None:
        """The ranks of `comm`, each with the GPU that is current. Collective.

        Raises `TransportError` where NCCL refuses; it may refuse one rank and leave the others waiting, for
        as long as `watchdog.limit` allows.
        """
        self.rank, self.size = comm.rank, comm.size
        self._nccl = nccl = _library()
        self._stream = stream
        self._operations = {"max": nccl.NCCL_MAX, "sum": nccl.NCCL_SUM}
        identity: Any = None
        if comm.rank == 0:
            try:
                identity = nccl.get_unique_id()
            except RuntimeError as error:  # NcclError; the others wait for the broadcast
                identity = PeerError(f"NCCL does not start: {error}; NCCL_DEBUG=INFO tells more")
        identity = comm.bcast(identity, root=0)
        if isinstance(identity, TransportError):
            raise identity
        try:
            with watchdog.Guarded("connecting by NCCL"):
                self._communicator = nccl.NcclCommunicator(comm.size, identity, comm.rank)
        except RuntimeError as error:
            raise PeerError(
                f"NCCL cannot connect {comm.size} ranks: {error}; NCCL_DEBUG=INFO tells more"
            ) from error
        # For good, so that only `close` and `abort` end it. CuPy destroys what Python collects, and NCCL
        # waits there (commDestroySync in its init.cc) until no graph holds the communicator: one of the same
        # garbage may go later, and a caller's own never.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._communicator))

    def exchange(self, receives: Iterable[PeerArray], sends: Iterable[PeerArray]) -> None:
        """Messages of (array, peer) as one group: they all travel at once."""
        self._nccl.groupStart()
        for array, peer in receives:
            self._communicator.recv(*self._elements(array), peer, self._stream.stream)
        for array, peer in sends:
            self._communicator.send(*self._elements(array), peer, self._stream.stream)
        self._nccl.groupEnd()

    def all_reduce(self, array: Array, operation: Literal["max", "sum"]) -> None:
        """Every element over all ranks, in place."""
        elements, code = self._elements(array), self._operations[operation]
        self._communicator.allReduce(elements[0], *elements, code, self._stream.stream)

    def _elements(self, array: Array) -> tuple[int, int, int]:
        """Where they begin, how many they are, and their type."""
        return self._stream.address(array), array.size, self._nccl.NCCL_FLOAT32

    def check(self) -> None:
        """Raise `TransportError` where NCCL has found out that something broke meanwhile."""
        try:
            self._communicator.check_async_error()
        except RuntimeError as error:
            raise PeerError(f"NCCL broke off: {error}; NCCL_DEBUG=INFO tells more") from error

    def close(self) -> None:
        """Collective. It waits for ever while a graph lives that holds the communicator."""
        self._communicator.destroy()

    def abort(self) -> None:
        """Leave without the others. It waits for graphs as `close` does."""
        self._communicator.abort()


connect = NcclCommunicator
