"""Runs one schedule on one MPI communicator as a flat program: a step is one C call, `kernels/cpu/step.c`.

The plan and the bits are those of `executors/mpi.py`, where Python runs the rounds one by one. Messages are
persistent requests of the MPI library that mpi4py has loaded, started and tested through its own functions.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

from treeattn.collectives.executors import instructions, mpi_abi, rounds
from treeattn.collectives.executors.instructions import NOBODY, Near, Requests, Step
from treeattn.collectives.executors.persistent import PersistentReducer
from treeattn.collectives.memory import HOST
from treeattn.collectives.operator import NativeOperator
from treeattn.collectives.reducer import NativeStep, Reduction
from treeattn.collectives.schedule import Schedule
from treeattn.errors import BackendError, TransportError

__all__ = ["Reducer", "problem"]

# enum result of kernels/cpu/step.c.
_DONE, _AGAIN, _FAILED, _OVERRUN = range(4)

# A wait comes back to Python this often, so that Ctrl-C ends it and somebody looks around.
_PATIENCE = ctypes.c_int64(50_000_000)  # nanoseconds
_ONE_LOOK = ctypes.c_int64(0)

# Looks at a flag or a request before the processor is offered to others. Where ranks share cores each look in
# vain keeps somebody from running: 1000 then cost 2 to 5 times the step.
_LOOKS, _LOOKS_CROWDED = 1000, 20


def problem(reduction: Reduction) -> str | None:
    """Why no program can run this reduction on this rank, in one line; None where one can."""
    if reduction.memory is not HOST or not isinstance(reduction.operator, NativeOperator):
        return "there is no compiled merge on the processor for these records"
    try:
        reduction.operator.native_code()
    except BackendError as error:
        return str(error)
    return mpi_abi.problem()


class Reducer(PersistentReducer):
    """A planned reduction of a buffer in place over all ranks of a communicator.

    As `executors.mpi.Reducer`, for a `NativeOperator` on the host, where no rank has a `problem`. ``start()``
    goes as far as it can without waiting. Raises `TransportError`, which names the round and the ranks, where
    MPI reports an error.
    """

    executor = "program"

    def __init__(self, reduction: Reduction, schedule: Schedule, *, crowded: bool = False) -> None:
        """crowded: ranks of this machine share cores."""
        self.certificate, lazily = rounds.plan(reduction, schedule)
        self._near = self._meet(reduction, schedule)
        # All ranks are here: what may fail on one of them alone comes after what they do together.
        super().__init__(schedule.name, reduction)
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._planned = list(lazily)  # owns the memory that the program works on
        self.sent = rounds.sent(self._planned)
        self.queued = not self._planned
        self._handles = [self._requested(round_) for round_ in self._planned]
        self._bind(reduction, _LOOKS_CROWDED if crowded else _LOOKS)

    def _meet(self, reduction: Reduction, schedule: Schedule) -> Near:
        """The ranks that are read from without messages. Collective."""
        return NOBODY

    def _requested(self, planned: rounds.RankRound) -> np.ndarray[Any, Any]:
        """Handles of the round's requests. Tag = round: a fast neighbour may be ahead."""
        comm, tag = self._comm, planned.number
        receives = instructions.by_message(planned.receives, self._near)
        sends = instructions.by_message(planned.sends, self._near)
        requests = [comm.Recv_init(m.array, m.peer, tag) for m in receives]
        requests += [comm.Send_init(m.array, m.peer, tag) for m in sends]
        self._requests += requests
        return mpi_abi.handles(requests)

    def _bind(self, reduction: Reduction, looks: int) -> None:
        """Everything that a step needs, where C finds it."""
        requests = [Requests(handles.ctypes.data, len(handles)) for handles in self._handles]
        self._program = instructions.lay_out(self._planned, requests, self._near)
        native = reduction.operator.native_code()
        self._statuses = mpi_abi.statuses(max(map(len, self._handles), default=0) + 1)
        self._struct = Step(
            *map(mpi_abi.function, mpi_abi.FUNCTIONS),
            merge=native.merge,
            programs=self._program.addresses,
            statuses=self._statuses.ctypes.data,
            comm=mpi_abi.value(self._comm),
            length=len(self._program.round_at),
            number=1,
            looks=looks,
            width=reduction.operator.width,
            any_source=MPI.ANY_SOURCE,
            any_tag=MPI.ANY_TAG,
        )
        self._native = native.run_step
        run_step = ctypes.CFUNCTYPE(ctypes.c_int64)(native.run_step)
        self._start = functools.partial(run_step, ctypes.byref(self._struct), _ONE_LOOK)
        self._go_on = functools.partial(run_step, ctypes.byref(self._struct), _PATIENCE)
        if not self._planned:  # a rank alone
            self._start = self._go_on = functools.partial(int)  # 0: done
        self._ended = False

    def _begin(self) -> None:
        self._ended = False
        self._advance()

    def _advance(self) -> bool:
        if not self._ended:
            result = self._start()
            if result > _AGAIN:
                self._fail(result)
            self._ended = result == _DONE
        return self._ended

    def _complete(self) -> None:
        if not self._ended:
            self._step()

    def _step(self) -> None:
        result = self._go_on()
        if result:
            self._wait(result)

    def native_step(self) -> NativeStep:
        """The program."""
        return NativeStep(self._native, ctypes.addressof(self._struct), _PATIENCE.value, self._within)

    def _within(self, call: Callable[[], int]) -> int:
        """A step that `call` begins, as `NativeStep.run` says. It counts itself when it has to wait."""
        if self._running or self._closed:
            return -1
        try:
            result = call()
            if result > 0:
                self._running = self._number = self._number + 1
                self._wait(result)
                self._running = 0
        except BaseException:
            # Nothing is broken off where a signal is heard of when the C call has ended the step.
            self._running = self._running or self._struct.result
            self._failed = self._running > 0
            raise
        return result

    def _wait(self, result: int) -> None:
        """What is left of a step after `_PATIENCE` of waiting in vain, or its error."""
        while result == _AGAIN:
            self._look_around()
            result = self._go_on()
        if result:
            self._fail(result)

    def _look_around(self) -> None:
        """After each `_PATIENCE` of waiting in vain; Python sees to signals before it."""
        if self._closed:  # by another thread, after an error there
            raise TransportError(f"{self.name}: closed in the middle of a step")

    def _at(self) -> rounds.RankRound | None:
        """The round that the step has come to; None if it has come to its end."""
        instruction = self._struct.next
        at = self._program.round_at
        return self._planned[at[instruction]] if instruction < len(at) else None

    def waits_for(self) -> tuple[str, str]:
        """The round, and its peers."""
        round_ = self._at()
        if round_ is None:
            return super().waits_for()
        return f"{self.name}, round {round_.number + 1}", rounds.peers(round_)

    def _fail(self, result: int) -> NoReturn:
        round_ = self._at()
        assert round_ is not None
        where = f"{self.name}, round {round_.number + 1}"
        if result == _OVERRUN:
            raise TransportError(f"{where}: a slot was written twice before it was read")
        code, peers = self._blamed(round_)
        reason = MPI.Get_error_string(code).splitlines()[-1].strip()
        raise TransportError(f"{where}: the messages with {peers} failed: {reason}")

    def _blamed(self, round_: rounds.RankRound) -> tuple[int, str]:
        """The error code of MPI, and the ranks that it is about: one, where the statuses tell which."""
        peers = [m.peer for m in (*round_.receives, *round_.sends) if m.peer not in self._near]
        code = self._struct.code
        if MPI.Get_error_class(code) == MPI.ERR_IN_STATUS:
            for peer, status in zip(peers, self._statuses, strict=False):
                error = mpi_abi.error_of(status)
                if error not in (MPI.SUCCESS, MPI.ERR_PENDING):
                    return error, f"rank {peer}"
        return code, "ranks " + ", ".join(map(str, sorted(set(peers))))
