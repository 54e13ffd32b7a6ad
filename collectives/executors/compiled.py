"""Runs one schedule on one MPI communicator as a compiled program: a step is a call of `kernels/cpu/step.c`.

The program and the bits are those of `executors/mpi.py`, where Python runs it. Messages are persistent
requests of the MPI library that mpi4py has loaded, started and tested through its own functions. What ranks
of a node send one another goes through shared memory where slots are passed in (`executors/slots.py`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from treeattn.collectives.executors import planned as planning
from treeattn.collectives.executors.lowering import Buffers, Requests, Step, landing_records, lower
from treeattn.collectives.executors.planned import Planned
from treeattn.collectives.program import messages
from treeattn.collectives.runtime import mpi_abi
from treeattn.collectives.runtime.memory import HOST
from treeattn.collectives.runtime.operator import NativeOperator
from treeattn.collectives.runtime.persistent_requests import PersistentRequests
from treeattn.collectives.runtime.reducer import NativeStep, ReductionSpec
from treeattn.collectives.runtime.reducer import Reducer as BaseReducer
from treeattn.collectives.schedule import Schedule
from treeattn.errors import BackendError, PeerError, StateError

if TYPE_CHECKING:
    from treeattn.collectives.executors.slots import Slots

# enum result of kernels/cpu/step.c.
_DONE, _AGAIN, _FAILED, _OVERRUN = range(4)

# The C wait returns to Python at this interval to deliver signals and to check peers.
_POLL_INTERVAL = ctypes.c_int64(50_000_000)  # nanoseconds
_POLL_ONCE = ctypes.c_int64(0)

# Polls of a flag or a request before the processor is offered to others. Where ranks share cores each poll in
# vain keeps another rank from running: 1000 then cost 2 to 5 times the step.
_SPINS, _SPINS_OVERSUBSCRIBED = 1000, 20


def problem(spec: ReductionSpec) -> str | None:
    """Why this reduction cannot be compiled on this rank, in one line; None where it can."""
    if spec.memory is not HOST or not isinstance(spec.operator, NativeOperator):
        return "there is no compiled merge on the processor for these records"
    try:
        spec.operator.native_code()
    except BackendError as error:
        return str(error)
    return mpi_abi.problem()


def plan(spec: ReductionSpec, schedule: Schedule, *, oversubscribed: bool = False) -> Reducer:
    """The reducer of a schedule whose messages all travel by MPI. Collective.

    spec: of a `NativeOperator` on the host, where no rank has a `problem`. oversubscribed: ranks of this
    machine share cores. Raises `ScheduleError` as `planned.plan` does.
    """
    return Reducer(spec, planning.plan(spec, schedule), None, oversubscribed)


class Reducer(BaseReducer):
    """A planned reduction of a buffer in place over all ranks of a communicator.

    ``start()`` goes as far as it can without waiting. Raises `PeerError`, which names the round and the
    ranks, where MPI reports an error.
    """

    def __init__(
        self, spec: ReductionSpec, planned: Planned, slots: Slots | None, oversubscribed: bool
    ) -> None:
        """slots: of this node, where the program uses some."""
        super().__init__(planned.name)
        self.executor = "slots" if slots else "program"
        self.certificate, self.sent, self._program = planned.certificate, planned.sent, planned.program
        self.stream_ordered = not self._program.instructions
        self._requests = PersistentRequests(spec.comm)
        self._requests.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._slots = slots
        self._ended = False
        self._bind(spec, planned, _SPINS_OVERSUBSCRIBED if oversubscribed else _SPINS)

    def _bind(self, spec: ReductionSpec, planned: Planned, spins: int) -> None:
        """Everything that a step needs, where C finds it."""
        arrays = planning.Interpreter(spec, planned, landing_records(self._program))
        handles = self._planned_messages(arrays)
        addresses = planned.records.ctypes.data, arrays.landing.ctypes.data
        self._lowered = lower(
            self._program,
            Buffers(*addresses, self._slots, planned.records[:1].nbytes),
            {number: Requests(each.ctypes.data, len(each)) for number, each in handles.items()},
        )
        statuses = mpi_abi.statuses(max(map(len, handles.values()), default=0) + 1)
        native = spec.operator.native_code()
        self._struct = Step(
            *map(mpi_abi.function, mpi_abi.FUNCTIONS),
            merge=native.merge,
            programs=self._lowered.addresses,
            statuses=statuses.ctypes.data,
            comm=mpi_abi.value(self._requests.comm),
            length=len(self._lowered.rounds),
            number=1,
            spins=spins,
            width=spec.operator.width,
            any_source=MPI.ANY_SOURCE,
            any_tag=MPI.ANY_TAG,
        )
        self._owned = arrays, handles
        self._statuses, self._native = statuses, native.run_step
        run_step = ctypes.CFUNCTYPE(ctypes.c_int64)(native.run_step)
        self._poll = functools.partial(run_step, ctypes.byref(self._struct), _POLL_ONCE)
        self._wait = functools.partial(run_step, ctypes.byref(self._struct), _POLL_INTERVAL)
        if self.stream_ordered:  # a rank alone
            self._poll = self._wait = functools.partial(int)  # 0: done

    def _planned_messages(self, arrays: planning.Interpreter) -> dict[int, NDArray[np.uint8]]:
        """Handles of the requests of each round with messages. Tag = round: a fast neighbour may be ahead."""
        planned = (
            (number, self._requests.add(number, *arrays.messages(instructions)))
            for number, instructions in self._program.by_round()
        )
        return {number: mpi_abi.handles(requests) for number, requests in planned if requests}

    def _begin(self) -> None:
        self._ended = False
        self._advance()

    def _advance(self) -> bool:
        if not self._ended:
            result = self._poll()
            if result > _AGAIN:
                self._fail(result)
            self._ended = result == _DONE
        return self._ended

    def _complete(self) -> None:
        if not self._ended:
            self._step()

    def _step(self) -> None:
        result = self._wait()
        if result:
            self._go_on(result)

    def native_step(self) -> NativeStep:
        """The program."""
        return NativeStep(self._native, ctypes.addressof(self._struct), _POLL_INTERVAL.value, self._as_step)

    def _as_step(self, call: Callable[[], int]) -> Callable[[], int]:
        """A whole step by `call`, as `NativeStep.as_step` says. It counts itself when it has to wait."""

        def step() -> int:
            if self._running or self._closed:
                return -1
            try:
                result = call()
                if result > 0:
                    self._running = self._number = self._number + 1
                    self._go_on(result)
                    self._running = 0
            except BaseException:
                # Nothing is broken off where a signal is heard of when the C call has ended the step.
                self._running = self._running or self._struct.result
                self._failed = self._running > 0
                raise
            return result

        return step

    def _go_on(self, result: int) -> None:
        """End a step that returned after its poll interval, or raise its error."""
        while result == _AGAIN:
            self._check_peers()
            result = self._wait()
        if result:
            self._fail(result)

    def _check_peers(self) -> None:
        """Raise `PeerError` where this wait cannot end; Python delivers signals before it."""
        if self._closed:  # by another thread, after an error there
            raise StateError(f"{self.name}: closed in the middle of a step")
        ended = self._slots.ended() if self._slots else []
        if ended:  # what has ended publishes nothing any more
            awaited = self._program.sources(self._round() or 0)
            rank = min(ended, key=lambda rank: (rank not in awaited, rank))  # others may have ended after it
            what, peers = self.waits_for()
            raise PeerError(f"{what}: rank {rank} has ended, while this one waits for {peers}")

    def _round(self) -> int | None:
        """The round that the step has come to; None if it has come to its end."""
        instruction, rounds = self._struct.next, self._lowered.rounds
        return rounds[instruction] if instruction < len(rounds) else None

    def waits_for(self) -> tuple[str, str]:
        """The round, and its peers."""
        number = self._round()
        if number is None:
            return super().waits_for()
        return f"{self.name}, round {number}", self._program.peers(number)

    def _fail(self, result: int) -> NoReturn:
        number = self._round()
        assert number is not None
        where = f"{self.name}, round {number}"
        if result == _OVERRUN:
            raise PeerError(f"{where}: a slot was written twice before it was read")
        code, peers = self._blamed(number)
        reason = MPI.Get_error_string(code).splitlines()[-1].strip()
        raise PeerError(f"{where}: the messages with {peers} failed: {reason}")

    def _blamed(self, number: int) -> tuple[int, str]:
        """The error code of MPI, and the ranks that it is about: one, where the statuses tell which."""
        sends, receives = messages(i for i in self._program.instructions if i.round == number)
        peers = [*(message.peer for message in receives), *(message.peer for message in sends)]
        code = self._struct.code
        if MPI.Get_error_class(code) == MPI.ERR_IN_STATUS:
            for peer, status in zip(peers, self._statuses, strict=False):
                error = mpi_abi.error_of(status)
                if error not in (MPI.SUCCESS, MPI.ERR_PENDING):
                    return error, f"rank {peer}"
        return code, "ranks " + ", ".join(map(str, sorted(set(peers))))

    def _release(self) -> None:
        self._requests.close()
        self._slots = None  # mapped for as long as it is known

    def _abandon(self) -> None:
        if not self.in_flight:
            self._requests.free()

    _at_exit = _abandon
