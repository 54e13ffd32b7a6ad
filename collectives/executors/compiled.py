"""Runs one schedule on one communicator as a compiled program: a step is a call of `kernels/cpu/step.c`.

The program and the bits are those of `executors/interpreter.py`. Messages are those of the communicator's
library (`runtime/mpi_communicator.py`, `runtime/torch_communicator.py`). What ranks of a node send each other
goes through shared memory where slots are passed in (`executors/slots.py`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NoReturn

from treeattn.collectives.executors.lowering import (
    Lowered,
    Planned,
    Regions,
    StepStruct,
    landing_records,
    messages_over,
    plan_program,
)
from treeattn.collectives.executors.slots import Slots, slots_of_node
from treeattn.collectives.runtime.memory import HOST
from treeattn.collectives.runtime.operator import NativeOperator, Operator
from treeattn.collectives.runtime.reducer import NativeStep, Reducer, ReductionSpec
from treeattn.collectives.schedule import Schedule
from treeattn.errors import BackendError, PeerError

# enum result of kernels/cpu/step.c.
_DONE, _AGAIN, _FAILED, _OVERRUN = range(4)

# The C wait returns to Python at this interval to deliver signals and to check peers.
_POLL_INTERVAL = ctypes.c_int64(50_000_000)  # nanoseconds
_POLL_ONCE = ctypes.c_int64(0)
# Peers are looked up after 1, 2, 4, 8, .. intervals, then every second: first those that the round awaits,
# then all of the node. 64 ranks on two cores that each look for 63 others have no time left for the step.
_INTERVALS_PER_LOOK = 20


# Where ranks share cores each poll in vain keeps another rank from running: 1000 then cost 2 to 5 times the
# step. Ranks that only yield are slower by 2 to 100 times as soon as another process computes.
_ALONE = {"spins": 1000, "awake": 2**63 - 1}  # of struct step
_OVERSUBSCRIBED = {"spins": 20, "awake": 100_000}


def problem(spec: ReductionSpec) -> str | None:
    """Why nothing of this reduction can be compiled on this rank, in one line; None where it can."""
    operator: Operator = spec.operator
    if spec.memory is not HOST or not hasattr(operator, "native_code"):
        return "there is no compiled merge on the processor for these records"
    try:
        operator.native_code()
    except BackendError as error:
        return str(error)
    return None


def plan(
    spec: ReductionSpec,
    schedule: Schedule,
    *,
    nodes: tuple[tuple[int, ...], ...] = (),
    oversubscribed: bool = False,
) -> CompiledReducer:
    """The reducer of a schedule. Collective.

    spec: of a `NativeOperator` on the host, where no rank has a `problem`, over a communicator of MPI whose
    functions can be called from C (`mpi_communicator.problem`). nodes: ranks that share memory, the same on
    every rank; without them all messages are the communicator's. oversubscribed: ranks of this machine share
    cores. Raises `ScheduleError` as `plan_program` does; `SharingError`, on every rank, where ranks of a node
    cannot share.
    """
    node = next((node for node in nodes if spec.comm.rank in node), ())
    planned = plan_program(spec, schedule, node, piecewise=not oversubscribed)
    record_bytes = planned.records[:1].nbytes
    slots = slots_of_node(spec.comm, node, planned.program, record_bytes) if nodes else None
    return CompiledReducer(spec, planned, slots, oversubscribed)


class CompiledReducer(Reducer):
    """A planned reduction of a buffer in place over all ranks of a communicator.

    ``start()`` goes as far as it can without waiting. Raises `PeerError`, which names the round and the
    ranks, where a message fails.
    """

    def __init__(
        self, spec: ReductionSpec, planned: Planned, slots: Slots | None, oversubscribed: bool
    ) -> None:
        """slots: of this node, where the program uses some."""
        messages = messages_over(spec.comm, planned.name) if spec.comm.size > 1 else None
        super().__init__(planned.name)
        self.executor = "slots" if slots else "program"
        self.certificate, self.sent, self._program = planned.certificate, planned.sent, planned.program
        self.stream_ordered = messages is None
        self.messages, self._slots = messages, slots
        self._ended = False
        self._native, self._merge = spec.operator.native_code()
        self._struct, self._rounds = StepStruct(number=1), list[int]()
        self._poll = self._wait = functools.partial(int)  # 0, of a rank alone: done
        if messages is not None:
            self._bind(spec, planned, _OVERSUBSCRIBED if oversubscribed else _ALONE)

    def _bind(self, spec: ReductionSpec, planned: Planned, waiting: dict[str, int]) -> None:
        operator: NativeOperator = spec.operator
        landing = HOST.empty((landing_records(self._program), operator.width), planned.records.dtype)
        regions = Regions(planned.records, landing)
        for number, instructions in self._program.by_round:
            self.messages.add(number, *regions.messages(instructions))
        self._lowered = Lowered(self._program, regions, self._slots, self.messages.rounds)
        self._struct = StepStruct(
            merge=self._merge,
            programs=self._lowered.addresses,
            length=len(self._lowered.rounds),
            number=1,
            **waiting,
            width=operator.width,
            **self.messages.fields(),
        )
        self._rounds = self._lowered.rounds
        run_step = ctypes.CFUNCTYPE(ctypes.c_int64)(self._native)
        poll = functools.partial(run_step, ctypes.byref(self._struct), _POLL_ONCE)
        self._poll = self.messages.polled(poll)
        self._wait = functools.partial(run_step, ctypes.byref(self._struct), _POLL_INTERVAL)

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
        waited, look = 0, 1
        while result == _AGAIN:
            waited += 1
            if waited >= look:
                self._check_peers(everyone=look > _INTERVALS_PER_LOOK)
                look += min(look, _INTERVALS_PER_LOOK)
            result = self._wait()
        if result:
            self._fail(result)

    def _check_peers(self, everyone: bool) -> None:
        """Raise `PeerError` where this wait cannot end; Python delivers signals before it."""
        awaited = self._program.sources(self._round() or 0)
        ended = self._slots.ended(None if everyone else awaited) if self._slots else []
        if ended:  # what has ended publishes nothing any more
            rank = min(ended, key=lambda rank: (rank not in awaited, rank))  # others may have ended after it
            what, peers = self.waits_for()
            raise PeerError(f"{what}: rank {rank} has ended, while this one waits for {peers}")

    def _round(self) -> int | None:
        """The round that the step has come to; None if it has come to its end."""
        instruction = self._struct.next
        return self._rounds[instruction] if instruction < len(self._rounds) else None

    def waits_for(self) -> tuple[str, str]:
        number = self._round()
        if number is None:
            return super().waits_for()
        return f"{self.name}, round {number}", self._program.peers(number)

    def _fail(self, result: int) -> NoReturn:
        number = self._round()
        assert number is not None
        if result == _OVERRUN:
            raise PeerError(f"{self.name}, round {number}: a slot was written twice before it was read")
        raise self.messages.failure(number, self._struct.code)

    def _release(self) -> None:
        if self.messages is not None:
            self.messages.close()
        self._slots = None  # mapped for as long as it is known
