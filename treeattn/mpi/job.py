"""The life of a job: its ranks find each other, signals end it, all leave together unless one fails alone."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn

import numpy as np

from treeattn.collectives.runtime import watchdog
from treeattn.errors import BackendError
from treeattn.mpi import launch, library
from treeattn.partial import Array

_PROMPT = 0.5  # seconds in which the main thread hears of a signal, unless it is in a blocking call
_command = False
_grouped = False  # whether ranks are those of torch's default process group
_handled: list[int] = []  # signals that end this process
_AGREES = 5.0  # seconds in which errors that were agreed on reach every rank


def start() -> None:
    """Initialise MPI, which waits for all ranks, and have it finalised at the end of this process; below
    torchrun a process group of gloo.

    mpi4py does both in calls that let no other thread run; so neither the watchdog nor a signal could end
    them.
    """
    global _command
    _command = True
    launcher, rank, size = launch.launched()
    if launcher == launch.TORCHRUN:
        watchdog.introduce(rank, size, launch.siblings)
        _start_group(size)
        return
    watchdog.introduce(rank, size, launch.siblings, launch.abort)
    mpi = library.load(initialize=False)
    if mpi.Is_initialized():
        return
    functions, provided = ctypes.CDLL(mpi.__file__), ctypes.c_int()
    with watchdog.Guarded("the start of MPI"):
        code = functions.MPI_Init_thread(None, None, library.thread_level(), ctypes.byref(provided))
    for number in _handled:  # again: UCX takes SIGHUP for a command to say all that it does
        signal.signal(number, signal.getsignal(number))
    if code != mpi.SUCCESS:
        raise BackendError(f"MPI does not start: MPI_Init_thread gives error {code}")
    for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # as mpi4py does
    watchdog.at_the_end(_finalize_mpi)


def _start_group(size: int) -> None:
    global _grouped
    try:
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous
    except ImportError as error:
        raise BackendError(
            f"torchrun started {size} processes, but torch cannot be loaded here ({error}): install it for "
            f"{sys.executable}, or start the job with mpiexec"
        ) from error
    with watchdog.Guarded("the start of the process group"):
        try:
            store, rank, _ = next(rendezvous("env://"))
            # torchrun keeps it for all commands of a shell, which would find the addresses of the first.
            number = store.add(f"commands of rank {rank}", 1)
            own = dist.PrefixStore(f"command {number}", store)
            dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
        except (ValueError, RuntimeError) as error:
            raise BackendError(f"the {size} ranks of torchrun make no process group: {error}") from error
    _grouped = True
    watchdog.at_the_end(dist.destroy_process_group)


def commanded() -> bool:
    """Whether this process is a command of this package on several ranks, which `start` and `finalize`."""
    return _command


def _finalize_mpi() -> None:
    mpi = library.load()
    if not mpi.Is_finalized():
        # While there is a communicator to abort: a rank that is stopped later may hide the exit code.
        if _command:
            with watchdog.Guarded("the end of MPI"), contextlib.suppress(mpi.Exception):
                mpi.COMM_WORLD.Barrier()
        watchdog.finalize_mpi(ctypes.CDLL(mpi.__file__).MPI_Finalize)


def end_on_signals(endings: Mapping[int, Callable[[], object]]) -> None:
    """On each of the signals, call what ends this process, from the main thread or, where a blocking call
    keeps that from hearing of it, within a second from another."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    heard = threading.Event()

    def handle(number: int, _: object) -> None:
        heard.set()
        endings[number]()

    def listen() -> None:
        while number := os.read(reader, 1):
            if number[0] in endings and not heard.wait(_PROMPT):
                _from_a_thread(endings[number[0]])

    for number in endings:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
            signal.signal(number, handle)
            _handled.append(number)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=listen, daemon=True).start()


def _from_a_thread(ending: Callable[[], object]) -> None:
    try:
        ending()
    except SystemExit as left:
        watchdog.end_job(left.code if isinstance(left.code, int) else 1)


def finalize(code: int, reason: str = "", patience: float | None = None) -> bool:
    """Wait for all ranks to leave too. True on the lowest rank that has a reason: it may tell it.

    Errors that were agreed on reach every rank. One that did not would leave the others waiting for this
    rank: it ends the job with `code`, after `patience` seconds. So does one that fails before MPI starts,
    where the others wait for it too, or fail likewise: then the lowest ends them.
    """
    rank, size = _place()
    if size > 1 and not (_grouped or library.started()):
        if not _command:
            return rank == 0  # it has not started with the others, and waits for none
        watchdog.speak(reason, code)
    if size == 1:
        return launch.launched_as()[0] == 0
    lowest = np.array([rank if reason else size])
    done = _minimum(lowest)
    patience = (_AGREES if reason else math.inf) if patience is None else patience
    with watchdog.Guarded("the end of the command"):
        if not watchdog.poll(done, patience, lambda: time.sleep(1e-3)):
            print(f"treeattn: rank {rank} failed alone, ending the job: {reason}", file=sys.stderr)
            end(code)
    return bool(lowest[0] == rank)


def _minimum(number: Array) -> Callable[[], bool]:
    """Begin to put the least of all ranks' numbers there; what tells whether that is done."""
    if _grouped:
        import torch
        import torch.distributed as dist

        work = dist.all_reduce(torch.from_numpy(number), dist.ReduceOp.MIN, async_op=True)
        completed: Callable[[], bool] = work.is_completed
        return completed
    mpi = library.load()
    test: Callable[[], bool] = mpi.COMM_WORLD.Iallreduce(mpi.IN_PLACE, number, mpi.MIN).Test
    return test


def abort(error: BaseException) -> NoReturn:
    """End the whole job because this rank failed: the others may be waiting for it."""
    rank, size = _place()
    sys.stdout.flush()
    what = "".join(traceback.format_exception_only(error)).strip()
    print(f"treeattn: rank {rank} of {size} failed, ending the job: {what}", file=sys.stderr)
    traceback.print_exception(error)
    end(1)


def leave() -> NoReturn:
    """Exit from a job of which other ranks are no commands, and take no part in how commands end."""
    global _command
    _command = False
    raise SystemExit(0)


def end(code: int) -> NoReturn:
    """Exit, and end all other ranks of the job if there are some."""
    if _place()[1] > 1:
        watchdog.end_job(code)
    raise SystemExit(code)


def _place() -> tuple[int, int]:
    """(rank, size) as MPI has them, or before it starts, and below torchrun, the launcher."""
    if _grouped or not library.started():
        return launch.launched_as()
    comm = library.load().COMM_WORLD
    return comm.rank, comm.size
