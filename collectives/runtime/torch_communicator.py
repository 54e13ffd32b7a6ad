"""Process groups of torch.distributed as communicators whose blocking calls are watched, and the messages of
a program over them: planned once, started and awaited round by round.

Torch is not imported before somebody passes a group. Records travel as messages with tags of this package's
own over the group itself: duplicates are channels, since a group of gloo costs a connection to every rank,
and `new_group` names one by a count that may differ between ranks.
"""

from __future__ import annotations

import copy
import ctypes
import re
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from treeattn.collectives.runtime import communicator, watchdog
from treeattn.collectives.runtime.communicator import Member
from treeattn.collectives.runtime.memory import Array, PeerArray, Requests
from treeattn.collectives.runtime.process import kernel, namespace
from treeattn.collectives.runtime.reducer import Messages, owner_of_communicator
from treeattn.errors import PeerError, StateError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

# Tags: this bit, then the channel, then the number of the message between two ranks. Torch takes 31 bits.
_OURS, _CHANNELS, _MESSAGES = 1 << 30, 1 << 18, 1 << 12

_LOST = re.compile("Connection (?:closed|reset) by peer|Broken pipe")


class TorchCommunicator:
    """The ranks of a process group, to which it holds no reference: a group of gloo that outlives
    `destroy_process_group` ends the process by a signal, when that ends."""

    library: Literal["torch"] = "torch"
    members: tuple[Member, ...] = ()

    def __init__(self, group: ProcessGroup) -> None:
        """Collective."""
        self._group, self._host = weakref.ref(group), _host_group(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._calls = watchdog.WatchedCalls()
        self._channel, self._channels = 0, [0]  # its own, and the last of the group
        self.owner, self.kept = owner_of_communicator(self.size), dict[Any, Any]()

    @classmethod
    def of(cls, group: ProcessGroup) -> TorchCommunicator:
        """The watched form of a group. Collective for the first time. Raises `StateError` for one that torch
        knows no more."""
        try:
            dist.get_rank(group)
        except ValueError:
            raise StateError(
                "comm is a process group that was destroyed: make one with torch.distributed.new_group"
            ) from None
        if group in _groups:
            return _groups[group]
        with watchdog.Activity("looking for the nodes"):
            comm = cls(group)
            place = socket.gethostname(), kernel(), namespace()
            placed = comm.allgather((place, dist.get_rank()))
            node = next(rank for other, rank in placed if other == place)
            comm.members = tuple(comm.allgather(Member.here(dist.get_rank(), node)))
            comm.owner.let_go()  # whichever thread comes first has it
        communicator.introduce(dist.get_rank(), dist.get_world_size(), comm.members)
        _groups[group] = comm
        return comm

    @property
    def group(self) -> ProcessGroup:
        """What it was made of. Raises `StateError` after its end."""
        group = self._group()
        if group is None:
            raise StateError("the process group was destroyed: decoders and caches over it are closed before")
        return group

    @property
    def host(self) -> ProcessGroup:
        return self._host or self.group

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by node: of one host, one kernel and one space of process numbers."""
        return communicator.node_groups(self.members)

    def allgather(self, sendobj: T, /) -> list[T]:
        if self.size == 1:
            return [sendobj]
        everyone: list[Any] = [None] * self.size
        self._run("allgather", dist.all_gather_object, everyone, sendobj, group=self.host)
        return everyone

    def bcast(self, obj: Any, /, root: int = 0) -> Any:
        if self.size == 1:
            return obj
        box: list[Any] = [obj]
        self._run("bcast", dist.broadcast_object_list, box, group=self.host, group_src=root)
        return box[0]

    def bcast_array(self, array: Array, root: int) -> None:
        tensor = torch.from_numpy(array.view("u1"))
        self._run("bcast_array", dist.broadcast, tensor, group=self.host, group_src=root)

    def exchange(self, receive: tuple[Array, int], send: tuple[Array, int]) -> Callable[[], None]:
        """Start a message into an array and one out of another, (array, peer) each; what waits for both."""
        operations = [self.operation(dist.irecv, *receive, 0), self.operation(dist.isend, *send, 0)]
        works = self._run("exchange", dist.batch_isend_irecv, operations)

        def wait() -> None:
            for work in works:
                self._run("exchange", work.wait)

        return wait

    def barrier(self) -> None:
        self._run("barrier", dist.barrier, group=self.host)

    def start_barrier(self) -> Callable[[], bool]:
        started: Any = self._run("barrier", dist.barrier, group=self.host, async_op=True)
        done: Callable[[], bool] = started.is_completed
        return done

    def dup(self) -> TorchCommunicator:
        """The same group, with tags of its own: the next that no rank has taken. Its collectives, which have
        no tags, remain the owner's."""
        made = copy.copy(self)
        self._channels[0] = made._channel = max(self.allgather(self._channels[0])) + 1
        return made

    def free(self) -> None:
        """Nothing is to be given back: the group is the caller's."""

    def operation(self, call: Callable[..., Any], array: Array, peer: int, number: int) -> Any:
        """A ``P2POp`` of `isend` or `irecv` on an array, of the host or of a GPU; number: of the message
        between the two ranks. They may not pass one another on a group that overtakes: each has its tag."""
        on_host = isinstance(array, np.ndarray)
        tensor = torch.from_numpy(array) if on_host else torch.utils.dlpack.from_dlpack(array)
        tag = _OURS | self._channel % _CHANNELS * _MESSAGES | number % _MESSAGES
        group = self.host if on_host else self.group
        return dist.P2POp(call, tensor, group=group, group_peer=peer, tag=tag)

    def _run(self, name: str, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        self.owner.take()
        try:
            return self._calls.run(name, call, *arguments, **options)
        except StateError:  # this is a forked process
            raise
        except RuntimeError as error:  # a connection is lost, or torch's own limit was reached
            what, _ = self._calls.waits_for()
            raise PeerError(f"{what}: torch.distributed failed: {reason(error)}") from None


_groups: weakref.WeakKeyDictionary[ProcessGroup, TorchCommunicator] = weakref.WeakKeyDictionary()


def reason(error: RuntimeError) -> str:
    """What torch says, in one line and without the place in its sources."""
    said = (str(error).strip().splitlines() or [repr(error)])[0]
    if lost := _LOST.search(said):
        return f"a rank has ended ({lost[0]})"
    return re.sub(r"^\[[^\]]*\] ", "", said)


def _host_group(group: ProcessGroup) -> ProcessGroup | None:
    """A group of gloo for a group that takes no host memory, as NCCL's; else None. Collective.

    `new_group` names the groups of all ranks by a count that all share, since all take part. With
    use_local_synchronization, which leaves the ranks of other groups alone, it goes by the groups that this
    process knows: ranks of a part must have made as many.
    """
    if "cpu:" in dist.get_backend_config(group):
        return None
    ranks = dist.get_process_group_ranks(group)
    part = len(ranks) < dist.get_world_size()
    made: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=part)
    return made


# What kernels/cpu/step.c calls: (number of rounds: 1, address of the round's, ..).
_STARTALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64))
_TESTALL = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.POINTER(ctypes.c_int),
    ctypes.c_void_p,
)


class TorchMessages(Messages):
    """Messages on a channel of their own. Python runs `start` and `wait` for each round, or compiled code
    calls them."""

    def __init__(self, comm: TorchCommunicator, name: str) -> None:
        """Collective."""
        super().__init__(name)
        self._comm = comm.dup()
        self._operations: dict[int, list[Any]] = {}
        self._counts: Counter[tuple[Any, int]] = Counter()
        self._under_way: list[Any] = []
        self._may_wait = True
        self._error: BaseException | None = None

    def add(self, number: int, receives: Iterable[PeerArray], sends: Iterable[PeerArray]) -> None:
        for call, given in ((dist.irecv, receives), (dist.isend, sends)):
            for array, peer in given:
                self._counts[call, peer] += 1
                operation = self._comm.operation(call, array, peer, self._counts[call, peer])
                self._operations.setdefault(number, []).append(operation)
                self._peers[number].append(peer)

    def start(self, number: int) -> None:
        """Start a round's. Raises `PeerError`, as `wait` does, where a rank is lost."""
        if number in self._operations:
            try:
                self._under_way = dist.batch_isend_irecv(self._operations[number])
            except RuntimeError as error:
                raise self.lost(number, reason(error)) from None

    def test(self, number: int) -> bool:
        """Whether the round has no messages: torch does not tell, without waiting, whether one of gloo has
        come."""
        return number not in self._operations

    def wait(self, number: int) -> None:
        try:
            while self._under_way:
                self._under_way[-1].wait()
                self._under_way.pop()
        except RuntimeError as error:
            raise self.lost(number, reason(error)) from None

    @property
    def rounds(self) -> dict[int, Requests]:
        self._numbers = {number: np.array([number], np.int64) for number in self._operations}
        return {number: Requests(each.ctypes.data, 1) for number, each in self._numbers.items()}

    def fields(self) -> dict[str, Any]:
        """The fields of `StepStruct`: calls back to Python, which only steps with messages make. Torch does
        not tell without waiting whether one of gloo has come: a test waits, or, where it may not, has not
        found it."""

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
