"""Communicators of this package: the default, those of callers, what ranks of one share, and agree on."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.communicator import Communicator, Member
from treeattn.collectives.runtime.process import kernel
from treeattn.errors import ANOTHER_PROCESS, ArgumentError, BackendError, StateError, TreeattnError
from treeattn.mpi import forked, launch, library

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from treeattn.collectives.runtime import mpi_communicator
    from treeattn.collectives.runtime.torch_communicator import TorchCommunicator

T = TypeVar("T")
#: For annotations: the class itself is imported where ranks are MPI's.
MpiCommunicator: TypeAlias = "mpi_communicator.MpiCommunicator"
#: The wait of ranks for one another.
DURING = "what all ranks plan together"


def world() -> MpiCommunicator:
    """COMM_WORLD, after making sure that the job did not come up as so many singletons.

    Collective for the first time, as `intracomm`.
    """
    _check_started()
    return _watched(library.load().COMM_WORLD)


@functools.cache  # what started this process stays what it is, and /proc is slow to read
def _check_started() -> None:
    """Raise `BackendError` where this process is one of a job, and finds itself alone."""
    alone = launch.launched().launcher == launch.TORCHRUN and not library.started()
    if problem := launch.problem(1 if alone else library.load().COMM_WORLD.size):
        raise BackendError(": ".join(problem))


def alone() -> MpiCommunicator:
    """This process by itself: COMM_SELF, watched."""
    return _watched(library.load().COMM_SELF)


def intracomm(comm: object) -> Communicator:
    """`comm` if it is a communicator of mpi4py or a process group of torch, watched; for None torch's default
    group where there is one, else COMM_WORLD. Collective for the first time.

    Raises `ArgumentError` for anything else, and `StateError` in a process that was forked from one of a job.
    """
    distributed = sys.modules.get("torch.distributed")  # without it there is no process group
    if distributed is not None and distributed.is_available():
        if comm is None and distributed.is_initialized():
            comm = distributed.group.WORLD
        if isinstance(comm, distributed.ProcessGroup):
            _check_fork("torch")
            return _of_torch().of(comm)
        if isinstance(comm, _of_torch()):
            _check_fork("torch")
            return comm
    if comm is None:
        return world()
    mpi: Any = sys.modules.get("mpi4py.MPI")
    null = mpi is not None and isinstance(comm, mpi.Comm) and comm == mpi.COMM_NULL
    if null or (distributed and isinstance(comm, int) and comm == distributed.GroupMember.NON_GROUP_MEMBER):
        raise ArgumentError("this rank is no member of the group that comm is: its members alone call")
    if type(comm).__name__ == "DeviceMesh":
        raise ArgumentError("comm is a DeviceMesh: pass the group of a dimension, such as mesh.get_group(0)")
    if mpi is None or not isinstance(comm, mpi.Intracomm):
        raise ArgumentError(
            "comm must be an intracommunicator of mpi4py, such as MPI.COMM_WORLD, or a process group of "
            f"torch.distributed, not {comm!r}"
        )
    return _watched(comm)


def mpi_intracomm(comm: object, what: str) -> MpiCommunicator:
    """As `intracomm`, for what goes by MPI alone. Raises `ArgumentError`, which names it, for torch's."""
    found: Any = intracomm(comm)
    if found.library != "mpi":
        raise ArgumentError(f"{what} takes a communicator of mpi4py: start the job with mpiexec")
    mpi: MpiCommunicator = found
    return mpi


def _check_fork(library: str) -> None:
    """Raise `StateError` where this process would communicate by the "mpi" or "torch" of its parent."""
    distributed: Any = sys.modules.get("torch.distributed")
    torch = distributed is not None and forked.group() is distributed.group.WORLD
    if forked.mpi if library == "mpi" else torch:
        raise StateError(f"what this process communicates by is {ANOTHER_PROCESS}")


def _of_torch() -> type[TorchCommunicator]:
    from treeattn.collectives.runtime.torch_communicator import TorchCommunicator

    return TorchCommunicator


def _watched(comm: Intracomm) -> MpiCommunicator:
    _check_fork("mpi")
    from treeattn.collectives.runtime import mpi_communicator

    return mpi_communicator.MpiCommunicator.of(comm)


def oversubscribed(comm: Communicator) -> bool:
    """Whether the machine of this rank has more ranks than cores for them.

    Nodes may be of one machine (containers, emulated nodes) and then share its cores; and the launcher may
    have started ranks of other communicators there.
    """
    return _oversubscribed(comm.members)


@functools.lru_cache(maxsize=64)
def _oversubscribed(members: tuple[Member, ...]) -> bool:
    here = [member.cores for member in members if member.kernel == kernel()]
    cores = functools.reduce(int.__or__, here).bit_count()
    return max(len(here), launch.local_size()) > cores


def node_local_rank(comm: object) -> int:
    """Which of the ranks on this node (shared memory domain) this one is, from 0. Collective for the first
    time, as `intracomm`."""
    known = intracomm(comm)
    return next(node.index(known.rank) for node in known.nodes if known.rank in node)


class Agreement:
    """``with Agreement(comm, "load") as agreed:`` around each rank's work: it succeeds on all or on none.
    Collective.

    call: which call of this package this is; where ranks are at different ones, each raises which one another
    rank is at. What the block raises on one rank, every rank raises. What it leaves in `must_match` (by the
    name that an error gives it) must be equal on all ranks. What it leaves in `share` is afterwards in
    `gathered`, by rank.
    """

    def __init__(self, comm: Communicator, call: str = "", during: str = DURING) -> None:
        self.comm, self._call, self._during = comm, call, during
        self.must_match: Mapping[str, object] = {}
        self.share: Any = None
        self.gathered: list[Any] = []

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # such as Ctrl-C: it ends this process, and so the job
        problem, cause = None if error is None else portable(error), error
        mine = {} if error else self.must_match
        views = exchange(self.comm, self._call, mine, problem, self.share, during=self._during)
        for rank, (_, problem, _) in enumerate(views):
            if problem is not None:
                where = "" if self.comm.size == 1 else f"rank {rank}: "
                raise type(problem)(f"{where}{problem}") from (cause if rank == self.comm.rank else None)
        for name in mine if len(views) > 1 else ():
            values = [values.get(name) for values, _, _ in views]
            different = [rank for rank, value in enumerate(values) if value != values[0]]
            if different:
                other = f"{values[different[0]]!r} on rank {different[0]}"
                raise ArgumentError(
                    f"{name} differs between ranks: {values[0]!r} on rank 0, {other}; every rank must pass "
                    "the same"
                )
        self.gathered = [shared for _, _, shared in views]


def exchange(comm: Communicator, call: str, *mine: Any, during: str = DURING) -> list[tuple[Any, ...]]:
    """What every rank says at this point of a call, by rank. Collective.

    during: the wait for it, as an error names it. Raises `StateError` where a rank is at another call.
    """
    if comm.size == 1:
        return [mine]
    with watchdog.Activity(during):
        said = comm.allgather((call, *mine))
    for rank, other in enumerate(one[0] if isinstance(one, tuple) else None for one in said):
        if other != call:
            raise StateError(
                f"rank {rank} is at another call{f': {other}' if other else ''}; this is rank {comm.rank}"
                f"{call and ', at '}{call}: all ranks make the same calls in the same order"
            )
    return [one[1:] for one in said]


def portable(error: Exception) -> TreeattnError:
    """An error of this rank as the others raise it."""
    if isinstance(error, TreeattnError):
        return error
    named = isinstance(error, TypeError | ValueError | OverflowError)  # what arguments bring about
    return (ArgumentError if named else TreeattnError)(f"{type(error).__name__}: {error}")


def must_match(comm: Communicator, mine: Mapping[str, object]) -> None:
    """Collective: return only if all ranks brought equal values; otherwise every rank raises the same, so
    that none is left waiting in a later call."""
    with Agreement(comm) as agreed:
        agreed.must_match = mine


def collectively(comm: Communicator, make: Callable[[], T], call: str = "") -> T:
    """Collective: what `make` makes on this rank; where it fails on one, every rank raises the same. call: as
    of an `Agreement`."""
    with Agreement(comm, call):
        return make()


def broadcast_from_root(comm: Communicator, decide: Callable[[], T], what: str) -> T:
    """Collective: what rank 0 decides, on every rank; where it fails, every rank raises the same.

    what: names this wait in the error of a late rank.
    """
    with Agreement(comm, what, what) as agreed:
        if comm.rank == 0:
            agreed.share = decide()
    made: T = agreed.gathered[0]
    return made
