"""What this package needs of MPI besides moving records: starting it, agreeing, and dying together."""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from treeattn import launch
from treeattn.collectives import waiting
from treeattn.errors import ArgumentError, BackendError, TreeattnError, no_communicator
from treeattn.launch import launched_as

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = [
    "Agreement",
    "Neighbours",
    "abort",
    "agree",
    "as_told",
    "cuda_aware",
    "decided",
    "end_job",
    "intracomm",
    "kernel",
    "launched_as",
    "leave",
    "library_version",
    "mpi",
    "neighbours",
    "node_groups",
    "node_local_rank",
    "started",
    "together",
    "world",
]

T = TypeVar("T")


def mpi() -> Any:
    """The `mpi4py.MPI` module. Raises `BackendError` where no MPI library can be loaded."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        lacking = "mpi4py" if getattr(error, "name", None) == "mpi4py" else "mpich"
        raise BackendError(
            f"no MPI library could be loaded ({reason}): install one with `pip install {lacking}`, "
            "or load your site's MPI module"
        ) from error
    return MPI


def library_version() -> str | None:
    """What the MPI library calls itself, or None where none can be loaded."""
    try:
        name: str = mpi().Get_library_version()
    except BackendError:
        return None
    return name.split("\n")[0].strip(" \t\x00")


def world() -> Intracomm:
    """COMM_WORLD, after making sure that the job did not come up as so many singletons."""
    comm: Intracomm = mpi().COMM_WORLD
    if comm.size == 1 and (problem := launch.problem()):
        raise BackendError(": ".join(problem))
    return comm


def intracomm(comm: object) -> Intracomm:
    """`comm` if it is a communicator; COMM_WORLD for None. Raises `ArgumentError` for anything else."""
    if comm is None:
        return world()
    kind: type[Intracomm] = mpi().Intracomm
    if not isinstance(comm, kind) or comm == mpi().COMM_NULL:
        raise ArgumentError(
            f"comm must be an intracommunicator of mpi4py, such as MPI.COMM_WORLD, not {comm!r}"
        )
    return comm


class Agreement:
    """``with Agreement(comm) as agreed:`` around each rank's work: it succeeds on all or on none. Collective.

    What the block raises on one rank, every rank raises. What it leaves in `equal` (by the name that an error
    gives it) must be equal on all ranks. What it leaves in `told` is afterwards in `everywhere`, by rank.
    """

    def __init__(self, comm: Intracomm) -> None:
        self._comm = comm
        self.equal: Mapping[str, object] = {}
        self.told: Any = None
        self.everywhere: list[Any] = []

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # such as Ctrl-C: it ends this process, and so the job
        problem, cause = None if error is None else as_told(error), error
        mine = {} if error else self.equal
        with waiting.watched("what all ranks plan together"):
            views: list[Any] = self._comm.allgather((mine, problem, self.told))
        for rank, (_, problem, _) in enumerate(views):
            if problem is not None:
                where = "" if self._comm.size == 1 else f"rank {rank}: "
                raise type(problem)(f"{where}{problem}") from (cause if rank == self._comm.rank else None)
        for name in mine:
            values = [values.get(name) for values, _, _ in views]
            different = [rank for rank, value in enumerate(values) if value != values[0]]
            if different:
                other = f"{values[different[0]]!r} on rank {different[0]}"
                raise ArgumentError(
                    f"{name} differs between ranks: {values[0]!r} on rank 0, {other}; every rank must pass "
                    "the same"
                )
        self.everywhere = [told for _, _, told in views]


def as_told(error: Exception) -> TreeattnError:
    """What other ranks are told of an error of this one."""
    if isinstance(error, TreeattnError):
        return error
    named = isinstance(error, TypeError | ValueError | OverflowError)  # what arguments bring about
    return (ArgumentError if named else TreeattnError)(f"{type(error).__name__}: {error}")


def agree(comm: Intracomm, mine: Mapping[str, object], error: Exception | None = None) -> None:
    """Collective: return only if no rank brought an `error` and all ranks brought equal values.

    Otherwise every rank raises the same exception, so that none is left waiting in a later call.
    """
    with Agreement(comm) as agreed:
        agreed.equal = mine
        if error is not None:
            raise error


def together(comm: Intracomm, make: Callable[[], T]) -> T:
    """Collective: what `make` makes on this rank; where it fails on one, every rank raises the same."""
    with Agreement(comm):
        return make()


def decided(comm: Intracomm, decide: Callable[[], T], what: str) -> T:
    """Collective: what rank 0 decides, on every rank; where it fails, every rank raises the same.

    what: the wait for it, as a late rank is told of.
    """
    told: tuple[T | None, TreeattnError | None] = None, None
    cause: Exception | None = None
    if comm.rank == 0:
        try:
            told = decide(), None
        except Exception as error:  # whatever it is, the others wait for this rank
            told, cause = (None, as_told(error)), error
    with waiting.watched(what):
        decision, problem = comm.bcast(told)
    if problem is not None:
        raise problem from (None if cause is problem else cause)
    made: T = decision
    return made


class Neighbours(NamedTuple):
    """Which ranks share what.

    nodes: ranks of each node (shared memory domain), nodes in order of their lowest rank. crowded: the
    machine of this rank has more ranks than cores for them.
    """

    nodes: tuple[tuple[int, ...], ...]
    crowded: bool


def neighbours(comm: Intracomm) -> Neighbours:
    """Asked once of each communicator, which keeps the answer. Collective."""
    known: Any = comm.Get_attr(_neighbours_key())
    if known is None:
        known = Neighbours(_node_groups(comm), _crowded(comm))
        comm.Set_attr(_neighbours_key(), known)
    kept: Neighbours = known
    return kept


@functools.cache
def _neighbours_key() -> int:
    key: int = mpi().Comm.Create_keyval()
    return key


def node_groups(comm: Intracomm) -> tuple[tuple[int, ...], ...]:
    """Ranks of `comm` by node (shared memory domain), nodes in order of their lowest rank. Collective."""
    return neighbours(comm).nodes


def _node_groups(comm: Intracomm) -> tuple[tuple[int, ...], ...]:
    with waiting.watched("looking for the nodes"):
        shared = _node(comm)
        leaders = comm.allgather(shared.bcast(comm.rank, root=0))
    shared.Free()
    groups: dict[int, list[int]] = {}
    for rank, leader in enumerate(leaders):
        groups.setdefault(leader, []).append(rank)
    return tuple(tuple(groups[leader]) for leader in sorted(groups))


def _crowded(comm: Intracomm) -> bool:
    """Nodes may be of one machine (containers, emulated nodes) and then share its cores."""
    cores = os.sched_getaffinity(0)
    with waiting.watched("looking for the nodes"):
        everyone = comm.allgather((kernel(), sum(1 << core for core in cores)))
    here = [mask for name, mask in everyone if name == kernel()]
    together = functools.reduce(int.__or__, here).bit_count()
    launched = max(
        int(os.environ.get(name, 0)) for name in launch.LOCAL_SIZES
    )  # perhaps in other communicators
    return bool(max(len(here), launched) > together)


def kernel() -> str:
    """What processes have in common if they run under the same kernel: its boot, else the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def node_local_rank(comm: Intracomm) -> int:
    """Which of the ranks on this node (shared memory domain) this one is, from 0. Collective."""
    shared = _node(comm)
    rank: int = shared.rank
    shared.Free()
    return rank


def _node(comm: Intracomm) -> Intracomm:
    """The ranks of this one's node. Raises `TransportError` where MPI has no communicator left."""
    try:
        node: Intracomm = comm.Split_type(mpi().COMM_TYPE_SHARED, key=comm.rank)  # type: ignore[assignment]
    except mpi().Exception as error:
        raise no_communicator(error) from error
    return node


def cuda_aware() -> bool | None:
    """Whether the MPI library says that it takes CUDA device pointers; None: it has no way of telling.

    Asked of the library that mpi4py has loaded: MPIX_Query_cuda_support (Open MPI, MPICH) or
    MPIX_GPU_query_support (MPICH and its descendants), neither of them in the standard. It is what the
    library was built and started for: whether device pointers really arrive, only a trial can tell.
    """
    library = ctypes.CDLL(mpi().__file__)
    if hasattr(library, "MPIX_Query_cuda_support"):
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):
        cuda, answer = ctypes.c_int(0), ctypes.c_int(0)  # MPIX_GPU_SUPPORT_CUDA is 0
        return library.MPIX_GPU_query_support(cuda, ctypes.byref(answer)) == 0 and bool(answer.value)
    return None


def started() -> bool:
    """Whether this process takes part in MPI already."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and module.Is_initialized() and not module.Is_finalized()


def leave(code: int, reason: str = "", patience: float = 5.0) -> bool:
    """Wait for all ranks to leave too. True on the lowest rank that has a reason: it may tell it.

    Errors that were agreed on reach every rank. One that did not would leave the others waiting for
    this rank until the end of the job's time limit: after `patience` seconds it ends the job with `code`.
    """
    if not started() or mpi().COMM_WORLD.size == 1:
        return launched_as()[0] == 0
    comm = mpi().COMM_WORLD
    mine, lowest = np.array([comm.rank if reason else comm.size]), np.empty(1, int)
    everyone = comm.Iallreduce(mine, lowest, mpi().MIN)
    deadline = time.monotonic() + patience
    while not everyone.Test():
        if time.monotonic() > deadline:
            print(f"treeattn: rank {comm.rank} failed alone, ending the job: {reason}", file=sys.stderr)
            end_job(code)
        time.sleep(0.001)
    return bool(lowest[0] == comm.rank)


def abort(error: BaseException) -> NoReturn:
    """End the whole job because this rank failed: the others may be waiting for it."""
    comm = mpi().COMM_WORLD
    sys.stdout.flush()
    what = "".join(traceback.format_exception_only(error)).strip()
    print(f"treeattn: rank {comm.rank} of {comm.size} failed, ending the job: {what}", file=sys.stderr)
    traceback.print_exception(error)
    end_job(1)


def end_job(code: int) -> NoReturn:
    """Exit, and end all other ranks of the job if there are some."""
    sys.stderr.flush()
    if started() and mpi().COMM_WORLD.size > 1:
        time.sleep(0.5)  # what was printed needs time to arrive: launchers drop what is under way
        mpi().COMM_WORLD.Abort(code)
    raise SystemExit(code)
