"""Tests that run inside an MPI job: mpiexec -n N python -m mpi4py -m pytest --with-mpi -x tests/mpi

Rank 0 reports. After every test all ranks exchange their outcome, so that a failure on any rank is shown
with its traceback and fails the test on all; a rank that does not come back ends the job by a deadline
(a waiting rank cannot be interrupted by pytest's own time limit).
"""

import os
import shutil
import sys
import tempfile
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # ranks outnumber cores; before NumPy is loaded

import numpy as np
import pytest
from mpi4py import MPI

from tests.emulator.raw_module import compiler_problem
from tests.emulator.runtime import EmulatorRuntime
from tests.support.fake_nccl import connected_by
from tests.support.models import write_model
from tests.support.nccl import NcclOverMpi
from treeattn.backends.cuda import cupy_runtime
from treeattn.collectives.runtime.mpi_communicator import MpiCommunicator
from treeattn.mpi import communicators

WORLD = MPI.COMM_WORLD
DEADLINE = float(os.environ.get("TREEATTN_TEST_DEADLINE", "120"))  # seconds that ranks may be apart
OUTCOMES = WORLD.Dup()  # never shared with the code under test


@pytest.fixture
def comm():
    """A duplicate of COMM_WORLD, freed after the test."""
    duplicate = communicators.world().dup()
    yield duplicate
    duplicate.free()


@pytest.fixture
def several(comm):
    """Marks what one rank cannot do: contradict another, or serve it."""
    if comm.size == 1:
        pytest.skip("one rank is not several")


@pytest.fixture
def written(comm, tmp_path):
    """Called with the name of a model and changes of it: its directory, written by rank 0."""
    path = comm.bcast(tmp_path)

    def write(name, *dtype, **changes):
        if comm.rank == 0:
            write_model(path / name, name, *dtype, **changes)
        comm.Barrier()
        return path / name

    return write


@pytest.fixture
def duplicates(monkeypatch):
    """Every duplicate of a communicator of several ranks that is made meanwhile. MPI has few (MPICH 2048),
    and one that nobody frees is gone for good."""
    made, dup = [], MpiCommunicator.dup

    def duplicate(self):
        made.append(dup(self))
        return made[-1] if self.size > 1 else made.pop()

    monkeypatch.setattr(MpiCommunicator, "dup", duplicate)
    return made


@pytest.fixture
def runtime(request, comm, monkeypatch):
    """What device="cuda" finds on this rank: an emulated GPU, of the kind that a module names `RUNTIME`."""
    if (problem := compiler_problem()) is not None:
        pytest.skip(problem)
    emulator = getattr(request.module, "RUNTIME", EmulatorRuntime)(seed=comm.rank)
    emulator.identity = f"emulated GPU {comm.rank}"
    monkeypatch.setattr(cupy_runtime, "current", lambda: emulator)
    return emulator


@pytest.fixture
def nccl_communicators(monkeypatch):
    return connected_by(monkeypatch, NcclOverMpi)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """A temporary folder for each rank: pytest keeps the last three of all, and ranks that clean up the same
    ones at the same time trip over one another."""
    config.option.basetemp = tempfile.mkdtemp(prefix=f"treeattn-rank{WORLD.rank}-")


def pytest_unconfigure(config):
    shutil.rmtree(config.option.basetemp, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "mpi":
            item.add_marker(pytest.mark.mpi)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if WORLD.rank:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter:
            reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115 - for the session


def pytest_report_header():
    announced = os.environ.get("PMI_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or "1"
    if int(announced) != WORLD.size:
        raise pytest.UsageError(f"launched {announced} processes, but MPI has {WORLD.size} ranks")
    return f"mpi: {MPI.Get_library_version().splitlines()[0]}, {WORLD.size} ranks"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.when != "call":
        return
    failures = _exchange(item.nodeid, str(report.longrepr) if report.failed else "")
    bad = {rank: text for rank, text in enumerate(failures) if text}
    if bad:
        report.outcome = "failed"
        report.longrepr = "\n".join(f"---- rank {rank} of {WORLD.size}\n{text}" for rank, text in bad.items())


def _exchange(test: str, failure: str) -> list[str]:
    """Every rank's failure text; ends the job if one does not answer in time."""
    mine, everyone = np.array([bool(failure)]), np.empty(WORLD.size, bool)
    request = OUTCOMES.Iallgather(mine, everyone)
    deadline = time.monotonic() + DEADLINE
    while not request.Test():
        if time.monotonic() > deadline:
            print(
                f"\nrank {WORLD.rank}: other ranks did not finish {test}\n{failure}",
                file=sys.__stderr__,
                flush=True,
            )
            WORLD.Abort(124)
        time.sleep(0.0002)
    return OUTCOMES.allgather(failure) if everyone.any() else [""] * WORLD.size
