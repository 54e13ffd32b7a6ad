"""How records travel between ranks, and who folds them on the way.

A scheme is a schedule, which an executor runs; a library's own reduction; or a baseline, which may also
attend while it communicates. Its row in the catalogue says which, and what it can do; nothing here knows the
name of one, but what ranks take where none is named.

From the host there is one transport, ``"mpi"``, which between ranks of a process group is torch's messages.
From GPUs there are four (`treeattn.decoder.gpu_reducers`), of which peer memory and NCCL are tried where none
is named.

A library or a baseline plans its own reducer. The rounds of a schedule on the host are run by one of
`treeattn.collectives.executors`, with the same bits:

- ``"slots"``: one C call a step; ranks of a node read each other's records in shared memory, and those of
  different nodes send them by MPI or torch.distributed, whichever has started them.
- ``"program"``: one C call a step, all messages by MPI.
- ``"mpi"``: Python, round by round: the reference, and what serves everywhere.
- ``"torch"``: the same by messages of torch.distributed, where the ranks are a process group's.

Unless one is asked for, ranks take the first that all of them can have.
"""

from __future__ import annotations

import functools
import warnings

from treeattn.backends.device import Device
from treeattn.collectives.catalog import DEVICES, Scheme, Selection
from treeattn.collectives.executors import compiled, interpreter
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.collectives.runtime.operator import Operator
from treeattn.collectives.runtime.reducer import Reducer, ReductionSpec
from treeattn.collectives.schedule import Result, Schedule
from treeattn.decoder.request import Reduction, of_reduction
from treeattn.decoder.request import refuse as refuse_properties
from treeattn.errors import RestrictionError, SharingError, TransportError
from treeattn.mpi import communicators
from treeattn.mpi.communicators import Agreement, collectively
from treeattn.partial import Array
from treeattn.selection import named, select

_CHOICES = {
    "cpu": "'mpi' or None",
    "cuda": "transport='nccl' (from GPU to GPU), 'peer' (GPUs of a node by one another's memory, nodes by "
    "NCCL), 'cuda-mpi' (the MPI library takes GPU buffers) or 'host' (any MPI, through page-locked memory)",
}


def selected(how: Reduction, comm: Communicator, device: str) -> Selection:
    """What `how` asks of the ranks of `comm`, or what they take where it names no scheme: see `Reduction`.

    Over the memory of one node the fewest rounds are the fastest; between GPUs, where a launch costs more
    than a message, all of them in one; between nodes, a message for each node. Raises `ScheduleError`.
    """
    if how.scheme is not None:
        return select(how.scheme)
    if len(comm.nodes) > 1:
        return named("hierarchical")
    return named("all_gather_merge" if device == "cuda" else "recursive_doubling")


def folding(
    scheme: str | Schedule | Reduction | None,
    because: str,
    comm: Communicator,
    device: str,
    *,
    to_root: bool = False,
) -> tuple[Reduction, Selection]:
    """What ``scheme=`` asks for where finished records are to be folded on every rank, or with `to_root` on
    rank 0.

    because: what an error says of why. Raises `ArgumentError`, `ScheduleError`, `RestrictionError`.
    """
    how = Reduction.of(scheme)
    selection = selected(how, comm, device)
    refuse_properties(of_reduction(how, selection) | {"folds": because, "folds everywhere": not to_root})
    return how, selection


def schedule(scheme: Selection, comm: Communicator, output: str = "replicated") -> Schedule | None:
    """The schedule of `scheme` for `comm`; node groups come from the machine where they are not given.
    output: as of a `Reduction`.

    None for a scheme that has none: a library's reduction, a baseline. Collective.
    """
    if scheme.row.module:
        return None
    result: Result = "root" if output == "root" else "replicated"
    return _built(scheme, comm.size, comm.nodes, result)


@functools.lru_cache(maxsize=32)
def _built(scheme: Selection, size: int, nodes: tuple[tuple[int, ...], ...], result: Result) -> Schedule:
    return scheme.build(size, nodes, result)


def candidates(
    device: str, transport: str | None, scheme: Scheme, size: int, library: str = "mpi"
) -> tuple[str, ...]:
    """Transports of a scheme over `size` ranks: the one that is named, if it serves, or those that are tried
    in turn where none is. library: whose messages the ranks send, as `Communicator.library`.

    Raises `TransportError`, which lists what would serve; `RestrictionError` where the scheme is not for
    the device.
    """
    serving = [name for name in scheme.transports if DEVICES[name] == device]
    if library != "mpi" and serving and scheme.module and "nccl" not in serving:
        raise RestrictionError(
            f"{scheme.name} is made of MPI's own calls, and these ranks are {library}.distributed's: take a "
            "schedule, such as recursive_doubling"
        )
    if library != "mpi" and transport == "cuda-mpi":
        raise TransportError(
            f"transport='cuda-mpi' needs MPI, and these ranks are {library}.distributed's: take 'peer', "
            "'nccl' or 'host'"
        )
    if not serving:
        served = scheme.devices[0]
        raise RestrictionError(f"{scheme.name} is for device={served!r}: on {device!r} take a schedule")
    if transport in serving:
        return (transport,)
    if transport is not None and DEVICES.get(transport) != device:
        raise TransportError(
            f"transport {transport!r} does not serve device={device!r}: use {_CHOICES[device]}"
        )
    unasked = tuple(name for name in ("mpi", "peer", "nccl") if name in serving)
    if transport is not None or not unasked:
        raise TransportError(
            f"{scheme.name} on device={device!r} is for transport={serving[0]!r}, not {transport!r}"
        )
    return unasked if size > 1 or scheme.module else ("mpi",)  # one rank sends nothing


def choose(comm: Communicator, device: Device, how: Reduction, scheme: Scheme) -> str:
    """The transport that is named, or the first of the `candidates` that all ranks can have. Collective;
    raises as they do, the same on every rank."""
    names = candidates(device.name, how.transport, scheme, comm.size, comm.library)
    if len(names) == 1:
        return names[0]
    from treeattn.decoder import gpu_reducers

    return gpu_reducers.first(names, comm, device.memory)


def plan(
    transport: str,
    selection: Selection,
    schedule: Schedule | None,
    reduction: ReductionSpec,
    executor: str | None = None,
) -> Reducer:
    """The reducer of a scheme that `choose` gave this transport. Collective; raises the same on every rank.

    schedule: what the scheme runs over these ranks; None where a library or a baseline does the work.
    """
    if schedule is None:
        refuse(executor, f"{selection.row.name} has none")
    if transport == "mpi":
        return over_mpi(selection, schedule, reduction, executor)
    from treeattn.decoder import gpu_reducers

    return gpu_reducers.PLANNERS[transport](selection, schedule, reduction, executor)


def plan_reducer(
    comm: Communicator, device: Device, how: Reduction, scheme: Selection, operator: Operator, buffer: Array
) -> Reducer:
    """The reducer of records that somebody else made: `buffer` [.., operator.width]. Collective.

    scheme: not one that is fused.
    """
    chosen = choose(comm, device, how, scheme.row)
    reduction = ReductionSpec(comm, operator, buffer, 1, device.memory)
    return plan(chosen, scheme, schedule(scheme, comm, how.output), reduction, how.executor)


def over_mpi(
    selection: Selection, schedule: Schedule | None, reduction: ReductionSpec, executor: str | None
) -> Reducer:
    """Buffers that MPI can reach as they are."""
    if schedule is None:
        if selection.row.compiled:
            collectively(reduction.comm, reduction.operator.mpi_function)
        return selection.row.plan(reduction, **selection.parameters)
    return run_rounds(executor, schedule, reduction)


# Library -> executors that send by another.
_OTHERS = {"mpi": ("torch",), "torch": ("mpi", "program")}


def refuse(executor: str | None, what: str) -> None:
    """Raise `TransportError` if an executor was asked for of `what`, which has none to choose."""
    if executor is not None:
        raise TransportError(f"executor={executor!r} is for schedules from the host: {what}; leave it out")


def run_rounds(executor: str | None, schedule: Schedule, reduction: ReductionSpec) -> Reducer:
    """The reducer of a schedule, run by the one that was asked for, or by the best. Collective.

    Raises `TransportError`, the same on every rank, where what was asked for cannot be had on some rank.
    """
    comm = reduction.comm
    library = comm.library
    if executor in _OTHERS[library]:
        raise TransportError(
            f"executor={executor!r} sends messages of another library than {library}, whose ranks these are: "
            f"take executor={library!r} or None"
        )
    oversubscribed = communicators.oversubscribed(comm)

    def by_messages() -> Reducer:
        if library == "mpi" and executor != "mpi":
            return compiled.plan(reduction, schedule, oversubscribed=oversubscribed)
        return interpreter.InterpretedReducer(reduction, schedule)

    if executor == library:
        return by_messages()
    not_callable = _not_callable(library)
    with Agreement(comm) as agreed:
        agreed.share = compiled.problem(reduction) or not_callable, oversubscribed
    problems = (f"rank {rank}: {text}" for rank, (text, _) in enumerate(agreed.gathered) if text)
    lacking = next(problems, None)
    if lacking is not None:
        _cannot(executor, lacking, repr(library))
        if not_callable is not None:  # else it is the records: their planner knows
            _warn(comm, f"Python runs every round, since {lacking}")
        return _instead(interpreter.InterpretedReducer(reduction, schedule), lacking)
    nodes = comm.nodes
    if len(nodes) == 1:
        # In how many pieces records go hangs on it, and launchers may tell ranks different things.
        oversubscribed = any(shared for _, shared in agreed.gathered)
    if executor == "program" or (executor is None and len(nodes) == comm.size):
        return by_messages()
    try:
        return compiled.plan(reduction, schedule, nodes=nodes, oversubscribed=oversubscribed)
    except SharingError as error:
        lacking = str(error)
        _cannot(executor, lacking, "'program'" if library == "mpi" else "'torch'")
        _warn(comm, f"ranks of a node send each other messages: no shared memory on {lacking}")
    return _instead(by_messages(), lacking)


def _not_callable(library: str) -> str | None:
    """Why compiled code cannot call this library on this rank; None where it can, or calls Python."""
    if library != "mpi":
        return None
    from treeattn.collectives.runtime import mpi_communicator

    return mpi_communicator.problem()


def _cannot(executor: str | None, lacking: str, other: str) -> None:
    """Raise `TransportError` if what is lacking was asked for."""
    if executor is not None:
        raise TransportError(
            f"executor={executor!r} cannot run here: {lacking}; take executor={other} or None"
        )


def _instead(reducer: Reducer, lacking: str) -> Reducer:
    reducer.fallback = lacking
    return reducer


def _warn(comm: Communicator, message: str) -> None:
    """Rank 0 speaks for all."""
    if comm.rank == 0:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
