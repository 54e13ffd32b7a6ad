"""The messages of a program over MPI, as compiled code starts and tests them: persistent requests, by the
functions of the MPI library that mpi4py has loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mpi4py import MPI
from numpy.typing import NDArray

from treeattn.collectives.executors.lowering import Requests
from treeattn.collectives.program import Program, messages
from treeattn.collectives.runtime import mpi_abi
from treeattn.collectives.runtime.persistent_requests import PersistentRequests
from treeattn.errors import PeerError

__all__ = ["MpiMessages"]


class MpiMessages:
    """The messages of one reducer, over a duplicate of its communicator."""

    def __init__(self, comm: Any, name: str, program: Program) -> None:
        """name: of the schedule. Collective. Raises `BackendError` as `duplicate` does."""
        self._name, self._program = name, program
        self._requests = PersistentRequests(comm)
        self._requests.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._handles: dict[int, NDArray[Any]] = {}

    def add(self, number: int, receives: Iterable[tuple[Any, int]], sends: Iterable[tuple[Any, int]]) -> None:
        """Plan the messages (array, peer) of a round. Tag = round: a fast neighbour may be ahead."""
        requests = self._requests.add(number, receives, sends)
        if requests:
            self._handles[number] = mpi_abi.handles(requests)

    @property
    def rounds(self) -> dict[int, Requests]:
        """Handles of the requests of each round that has some."""
        return {number: Requests(each.ctypes.data, len(each)) for number, each in self._handles.items()}

    def fields(self) -> dict[str, Any]:
        """Of `Step`, by which the compiled code sends. After the last `add`."""
        self._statuses = mpi_abi.statuses(max(map(len, self._handles.values()), default=0) + 1)
        functions = zip(("startall", "testall", "iprobe"), mpi_abi.FUNCTIONS, strict=True)
        return {
            **{field: mpi_abi.function(name) for field, name in functions},
            "statuses": self._statuses.ctypes.data,
            "comm": mpi_abi.value(self._requests.comm),
            "any_source": MPI.ANY_SOURCE,
            "any_tag": MPI.ANY_TAG,
        }

    def polled(self, poll: Callable[[], int]) -> Callable[[], int]:
        """What runs the step without waiting: testing waits for nothing."""
        return poll

    def failure(self, number: int, code: int) -> PeerError:
        """What a code of MPI in that round is raised as."""
        code, peers = self._blamed(number, code)
        reason = MPI.Get_error_string(code).splitlines()[-1].strip()
        return PeerError(f"{self._name}, round {number}: the messages with {peers} failed: {reason}")

    def _blamed(self, number: int, code: int) -> tuple[int, str]:
        """The error code of MPI, and the ranks that it is about: one, where the statuses tell which."""
        sends, receives = messages(i for i in self._program.instructions if i.round == number)
        peers = [*(message.peer for message in receives), *(message.peer for message in sends)]
        if MPI.Get_error_class(code) == MPI.ERR_IN_STATUS:
            for peer, status in zip(peers, self._statuses, strict=False):
                error = mpi_abi.error_of(status)
                if error not in (MPI.SUCCESS, MPI.ERR_PENDING):
                    return error, f"rank {peer}"
        return code, "ranks " + ", ".join(map(str, sorted(set(peers))))

    def free(self) -> None:
        """Free the requests, none of which may be active."""
        self._requests.free()

    def close(self) -> None:
        """Free everything. Collective."""
        self._requests.close()
