"""The messages of a program over torch.distributed: planned once, started and awaited round by round."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch.distributed as dist

from treeattn.collectives.executors.lowering import Requests
from treeattn.collectives.program import Program
from treeattn.collectives.runtime.memory import Array, Message
from treeattn.collectives.runtime.torch_communicator import TorchCommunicator, reason
from treeattn.errors import PeerError

# What kernels/cpu/step.c calls: (number of rounds: 1, address of the round's, ..).
_STARTALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64))
_TESTALL = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.POINTER(ctypes.c_int),
    ctypes.c_void_p,
)


class TorchMessages:
    """The messages of one reducer, on a channel of its own. Python runs `start` and `wait` for each round, or
    compiled code calls them."""

    def __init__(self, comm: TorchCommunicator, name: str, program: Program) -> None:
        """name: of the schedule. Collective."""
        self._comm, self._name, self._program = comm.dup(), name, program
        self._operations: dict[int, list[Any]] = {}
        self._counts: Counter[tuple[Array, int]] = Counter()
        self._under_way: list[Any] = []
        self._may_wait = True
        self._error: BaseException | None = None

    def add(self, number: int, receives: Iterable[Message], sends: Iterable[Message]) -> None:
        given = [(dist.irecv, *one) for one in receives] + [(dist.isend, *one) for one in sends]
        if given:
            self._operations[number] = [self._planned(*one) for one in given]

    def _planned(self, call: Any, array: Array, peer: int) -> Any:
        self._counts[call, peer] += 1
        return self._comm.operation(call, array, peer, self._counts[call, peer])

    def start(self, number: int) -> None:
        """Start a round's. Raises `PeerError`, as `wait` does, where a rank is lost."""
        if number in self._operations:
            try:
                self._under_way = dist.batch_isend_irecv(self._operations[number])
            except RuntimeError as error:
                raise self._lost(number, error) from None

    def test(self, number: int) -> bool:
        """Whether the round has no messages: torch does not tell, without waiting, whether one of gloo has
        come."""
        return number not in self._operations

    def wait(self, number: int) -> None:
        """Return when those of the round that was started have come and gone."""
        try:
            while self._under_way:
                self._under_way[-1].wait()
                self._under_way.pop()
        except RuntimeError as error:
            raise self._lost(number, error) from None

    def _lost(self, number: int, error: RuntimeError) -> PeerError:
        peers = self._program.peers(number)
        return PeerError(f"{self._name}, round {number}: the {peers} failed: {reason(error)}")

    @property
    def rounds(self) -> dict[int, Requests]:
        """The number of each round that has some, where C finds it."""
        self._numbers = {number: np.array([number], np.int64) for number in self._operations}
        return {number: Requests(each.ctypes.data, 1) for number, each in self._numbers.items()}

    def fields(self) -> dict[str, Any]:
        """Of `StepStruct`: calls back to Python, which only steps with messages make. Torch does not tell
        without waiting whether one of gloo has come: a test waits, or, where nobody may, has not found it."""

        def startall(_: int, number: Any) -> int:
            return self._code(self.start, number[0])

        def testall(_: int, number: Any, complete: Any, statuses: Any) -> int:
            complete[0] = self._may_wait
            return self._code(self.wait, number[0]) if self._may_wait else 0

        self._calls = _STARTALL(startall), _TESTALL(testall)
        start, test = (ctypes.cast(call, ctypes.c_void_p).value for call in self._calls)
        return {"startall": start, "testall": test}

    def _code(self, call: Callable[[int], None], number: int) -> int:
        """0, or 1 for what `failure` raises: no exception passes through C."""
        try:
            call(number)
        except BaseException as error:
            self._error = error
        return int(self._error is not None)

    def polled(self, poll: Callable[[], int]) -> Callable[[], int]:
        """`poll`, which goes on with a step, without waiting for a message."""

        def polled() -> int:
            self._may_wait = False
            try:
                return poll()
            finally:
                self._may_wait = True

        return polled if self._operations else poll

    def failure(self, number: int, code: int) -> BaseException:
        assert self._error is not None
        return self._error

    def free(self) -> None:
        """Let go of the process group, which planned messages hold."""
        self._operations.clear()
        self._under_way.clear()

    def close(self) -> None:
        self.free()
        self._comm.free()
