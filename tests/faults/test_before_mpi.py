"""A rank that ends before MPI starts, or never ends it: the others, which wait for it, all end."""

import re

import pytest

from tests.command.launch import run

from . import jobs, table

#: What rank 1 does first.
PROGRAM = """
import os, runpy, sys, time
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "mpi4py.MPI":
            raise error
if "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    exec(sys.argv.pop(1))
else:
    sys.argv.pop(1)
runpy.run_module("treeattn", run_name="__main__", alter_sys=True)
"""
RAISES = "error = {}; sys.meta_path.insert(0, Broken())"

LAUNCHERS = [
    pytest.param(name, marks=[pytest.mark.skipif(lacking is not None, reason=str(lacking)), *deep])
    for name, deep in zip(table.LAUNCHERS, ([], [pytest.mark.deep]), strict=False)
    for lacking in [jobs.lacking(name)]
]


def job(launcher, first, limit=600):
    """How it ends: the exit code, and what was said."""
    command = jobs.started(launcher, 3, ["-c", PROGRAM, first, "schedule", "ring", "--ranks", "3"])
    with jobs.Job(command, TREEATTN_TIMEOUT=str(limit)) as started:
        started.ended()
    return started.result


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("ImportError('libmpi.so')", r"^treeattn: rank 1: no MPI library could be loaded \(libmpi.so\)"),
        ("MemoryError()", "^treeattn: rank 1 of 3 failed, ending the job: MemoryError"),
    ],
)
def test_what_fails_in_the_command_is_said(launcher, error, says):
    code, said = job(launcher, RAISES.format(error))
    assert code == 1, said
    assert len(re.findall("^treeattn: ", said, re.MULTILINE)) == 1, said
    assert re.search(says, said, re.MULTILINE), said


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_limit_has_its_exit_code_there_too(launcher):
    code, said = job(launcher, "time.sleep(600)", limit=1)
    assert code == 124, said
    assert re.search(r"^treeattn: rank \d: the start of MPI: 1 s without", said, re.MULTILINE), said


# MPI_Finalize frees every communicator before it waits: there is none left to abort.
LEAVES = """
import os, signal
from treeattn.mpi import job
job.start()
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.skipif(jobs.lacking("MPICH") is not None, reason=str(jobs.lacking("MPICH")))
def test_the_limit_holds_at_the_end_of_mpi():
    done = run("-c", LEAVES, ranks=2, code=124, TREEATTN_TIMEOUT="1")
    assert re.search(
        "^treeattn: rank 0: the end of MPI: 1 s without .*: rank 1 is stopped", done.stderr, re.M
    )
