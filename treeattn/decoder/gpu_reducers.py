"""Reducers of records that lie in the memory of GPUs, by transport:

- ``"nccl"``: NCCL, from GPU to GPU: grouped sends and receives with merge kernels between, as one CUDA graph.
- ``"peer"``: GPUs of one node read one another's memory: a reduction is one kernel; over several nodes some
  launches of it, with NCCL's messages between.
- ``"cuda-mpi"``: an MPI library that takes GPU buffers; the host starts every round.
- ``"host"``: any MPI library: down through page-locked memory, folded on the processor, and up again.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

from treeattn import partial
from treeattn.backends import cpu
from treeattn.backends.cuda.runtime import Runtime
from treeattn.collectives.catalog import DEVICES, Selection
from treeattn.collectives.runtime import nccl
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.collectives.runtime.memory import HOST
from treeattn.collectives.runtime.reducer import Reducer, ReductionSpec
from treeattn.collectives.schedule import Schedule
from treeattn.decoder.reducers import over_mpi, refuse
from treeattn.errors import TransportError, TreeattnError
from treeattn.mpi import library
from treeattn.mpi.communicators import Agreement, collectively


def _over_nccl(
    selection: Selection, schedule: Schedule | None, reduction: ReductionSpec, executor: str | None
) -> Reducer:
    from treeattn.collectives.executors import nccl as over_nccl

    refuse(executor, "NCCL runs what is recorded in a graph")
    communicator = connected_by_nccl(reduction.comm, reduction.memory)
    connected = reduction._replace(comm=communicator)

    def planned() -> Reducer:
        if schedule is None:
            return selection.row.plan(connected, **selection.parameters)
        return over_nccl.plan(connected, schedule)

    try:
        return collectively(reduction.comm, planned)
    except TreeattnError:
        communicator.abort()
        raise


def connected_by_nccl(comm: Communicator, stream: Runtime) -> nccl.NcclCommunicator:
    """NCCL over the ranks and their GPUs. Collective; all raise `TransportError`, or none."""
    _check_nccl(comm, stream)
    return collectively(comm, lambda: nccl.connect(comm, stream))


def _check_nccl(comm: Communicator, stream: Runtime) -> None:
    """Raise, the same on all ranks, where they cannot meet by NCCL. Collective."""
    with Agreement(comm) as agreed:
        problem = nccl.problem()
        if problem is not None:
            raise TransportError(problem)
        agreed.must_match = {"the version of NCCL": nccl.version()}
    shared = shared_gpu(comm, stream)
    with Agreement(comm):
        problem = shared and nccl.sharing_problem()
        if problem:
            raise TransportError(f"{shared}: {problem}; or start fewer ranks, or take transport='host'")


def _over_peers(
    selection: Selection, schedule: Schedule | None, reduction: ReductionSpec, executor: str | None
) -> Reducer:
    from treeattn.collectives.executors import nccl as over_nccl
    from treeattn.collectives.executors import peer

    refuse(executor, "here one kernel runs them")
    assert schedule is not None, f"{selection.text}: only schedules have this transport"
    comm, nodes = reduction.comm, reduction.comm.nodes
    communicator: nccl.NcclCommunicator | None = None
    if len(nodes) > 1:
        with _for_other_nodes():
            communicator = connected_by_nccl(comm, reduction.memory)
    try:
        windows = collectively(comm, lambda: peer.Windows(reduction, schedule, nodes))
    except TreeattnError:
        if communicator:
            communicator.abort()
        raise
    if communicator:
        reducer: Reducer = over_nccl.plan_between_nodes(windows, communicator, reduction.memory)
    else:
        reducer = peer.PeerReducer(windows, reduction.memory)
    try:
        exposed = comm.allgather(collectively(comm, windows.expose))
        collectively(comm, lambda: windows.connect(exposed))
    except TreeattnError:
        reducer.close()
        raise
    return reducer


@contextlib.contextmanager
def _for_other_nodes() -> Iterator[None]:
    try:
        yield
    except TransportError as error:
        raise TransportError(f"transport='peer' sends between nodes by NCCL: {error}") from error


def _check_peers(comm: Communicator, runtime: Any) -> None:
    """Raise, the same on all ranks, where they cannot open one another's memory: tried with the least there
    is. Collective."""
    nodes = comm.nodes
    if len(nodes) > 1:
        with _for_other_nodes():
            _check_nccl(comm, runtime)
    near = next(node for node in nodes if comm.rank in node)
    own: list[int] = []
    opened: list[int] = []

    def expose() -> bytes:
        address, handle = runtime.expose(1)
        own.append(address)
        return handle  # type: ignore[no-any-return]

    try:
        handles = comm.allgather(collectively(comm, expose))
        others = (runtime.open_exposed(handles[rank]) for rank in near if rank != comm.rank)
        collectively(comm, lambda: opened.extend(others))
    finally:
        for other in opened:
            runtime.close_exposed(other)
        comm.barrier()  # nobody withdraws what another has open
        for address in own:
            runtime.withdraw(address)


def _over_cuda_mpi(
    selection: Selection, schedule: Schedule | None, reduction: ReductionSpec, executor: str | None
) -> Reducer:
    _check_cuda_mpi(reduction.comm, reduction.memory)
    return collectively(reduction.comm, lambda: over_mpi(selection, schedule, reduction, executor))


def _check_cuda_mpi(comm: Communicator, runtime: Runtime) -> None:
    """Raise, the same on all ranks, where MPI does not say that it takes the memory of GPUs. Collective."""
    with Agreement(comm):
        if not library.cuda_aware():
            raise TransportError(
                "this MPI library does not say that it takes GPU buffers (treeattn doctor names it): load a "
                "CUDA-aware one, or take transport='nccl' or 'host'"
            )


def problems(comm: Communicator, runtime: Runtime) -> dict[str, str | None]:
    """Transport of GPUs -> why these ranks cannot take it, with the remedy; None where they can. Collective,
    and the same on every rank."""
    return {name: problem(name, comm, runtime) for name, device in DEVICES.items() if device == "cuda"}


def problem(name: str, comm: Communicator, runtime: Any) -> str | None:
    check = {"nccl": _check_nccl, "peer": _check_peers, "cuda-mpi": _check_cuda_mpi}.get(name)
    try:
        if check is not None:
            check(comm, runtime)
    except TreeattnError as error:
        return str(error)
    return None


def first(names: tuple[str, ...], comm: Communicator, runtime: Any) -> str:
    """The first of these transports that all ranks can have; between nodes of one rank each NCCL alone.
    Rank 0 says it, once, and what keeps them from the one before. Collective. Raises `TransportError` where
    there is none."""
    nodes, lacking = comm.nodes, list[str]()
    for name in ("nccl",) if len(nodes) == comm.size else names:
        lacks = problem(name, comm, runtime)
        if lacks is None:
            near = "peer memory" if len(nodes) == 1 else "peer memory within nodes and NCCL between them"
            by = near if name == "peer" else "NCCL"
            if comm.rank == 0:
                say("; ".join([f"records travel from GPU to GPU by {by} (transport={name!r})", *lacking]))
            return name
        lacking.append(f"no transport={name!r}: {lacks}")
    raise TransportError(
        f"{'; '.join(lacking)}; transport='host' copies through the memory of the hosts, where it is named"
    )


@functools.cache
def say(line: str) -> None:
    """To standard error, once."""
    print(f"treeattn: {line}", file=sys.stderr, flush=True)


class Staged(Reducer):
    """A reduction on the processor, between two copies through page-locked memory."""

    def __init__(
        self, selection: Selection, schedule: Schedule | None, reduction: ReductionSpec, executor: str | None
    ) -> None:
        super().__init__(selection.text)
        self._runtime: Runtime = reduction.memory
        self._buffer = buffer = reduction.buffer
        self._host = collectively(reduction.comm, lambda: self._runtime.pinned(buffer.shape, buffer.dtype))
        operator = cpu.MergeOperator(reduction.operator.width - partial.EXTRA, reduction.operator.dtype)
        on_host = reduction._replace(operator=operator, buffer=self._host, memory=HOST)
        self._reducer = over_mpi(selection, schedule, on_host, executor)
        self.certificate, self.sent = self._reducer.certificate, self._reducer.sent
        self.executor, self.fallback = self._reducer.executor, self._reducer.fallback

    def waits_for(self) -> tuple[str, str]:
        return self._reducer.waits_for()

    def _step(self) -> None:
        """A call of what is inside, where that is another thing than its halves."""
        self._runtime.copy(self._host, self._buffer)
        self._runtime.synchronize()
        self._reducer()
        self._runtime.copy(self._buffer, self._host)

    def _begin(self) -> None:
        self._runtime.copy(self._host, self._buffer)
        self._runtime.synchronize()
        self._reducer.start()

    def _advance(self) -> bool:
        return self._reducer.test()

    def _complete(self) -> None:
        self._reducer.wait()
        self._runtime.copy(self._buffer, self._host)

    def _release(self) -> None:
        """Release after the last copy, in whichever stream, whose memory then goes back."""
        self._runtime.synchronize_all()
        self._reducer.close()

    def _abandon(self) -> None:
        self._runtime.synchronize_all()
        self._reducer.__exit__(RuntimeError)


def shared_gpu(comm: Communicator, runtime: Runtime) -> str | None:
    """Which ranks share which GPU or MIG partition, where some do; else None. Collective."""
    owners: dict[str, list[int]] = {}  # by UUID alone: containers of one machine may have names of their own
    devices = comm.allgather((runtime.identity, socket.gethostname()))
    for rank, (identity, _) in enumerate(devices):
        owners.setdefault(identity, []).append(rank)
    for identity, ranks in owners.items():
        if len(ranks) > 1:
            return f"ranks {', '.join(map(str, ranks))} share GPU {identity} of {devices[ranks[0]][1]}"
    return None


#: Transport -> what plans a scheme over it: of its selection, schedule, reduction and executor.
PLANNERS: dict[str, Callable[[Selection, Schedule | None, ReductionSpec, str | None], Reducer]] = {
    "nccl": _over_nccl,
    "peer": _over_peers,
    "cuda-mpi": _over_cuda_mpi,
    "host": Staged,
}
