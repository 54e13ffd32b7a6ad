"""In no command of several ranks is a call of MPI that may wait for others outside the limit of waits.

By the calls themselves, which a preloaded library tells of, whoever makes them: mpi4py, kernels, steps.
"""

import re
from pathlib import Path

import pytest

from tests.command.launch import run
from tests.support.builds import built

from . import jobs, play, table

pytestmark = pytest.mark.skipif(jobs.lacking("MPICH") is not None, reason=str(jobs.lacking("MPICH")))

SOURCE = Path(__file__).with_name("mpi_calls.c")
LONG = {"calibrate", "compare", "paper"}  # seconds
COMMANDS = [pytest.param(name, marks=[pytest.mark.deep] * (name in LONG)) for name in table.TOGETHER]


@pytest.fixture(scope="module")
def preloaded():
    compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-"]
    library = str(built(".so", compiler, stdin=SOURCE.read_text()))
    return {"LD_PRELOAD": library, "PRELOADED": library}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return play.prepared(tmp_path_factory.mktemp("calls"))


def outside(words, preloaded):
    """The calls on two ranks that the watchdog did not know of, and all that was said."""
    said = run(*words, ranks=2, **preloaded).stderr
    heard = [int(number) for number in re.findall(r"heard (\d+) calls", said)]
    assert len(heard) == 2, said
    assert min(heard) > 0, said
    return re.findall(r"outside the limit: (\w+)", said), said


@pytest.mark.parametrize("command", COMMANDS)
def test_the_watchdog_knows_of_every_call(command, folder, preloaded):
    words = table.TOGETHER[command].format(tmp=folder).split()
    calls, said = outside(["-m", "tests.faults.told_calls", *words], preloaded)
    assert not calls, said


def test_one_that_it_does_not_know_of_is_found(preloaded):
    lines = (
        "from tests.faults import told_calls",
        "from treeattn.mpi import communicators",
        "world = communicators.world()",
        "told_calls.start()",
        "world.Barrier()",
        "world.unwatched.Allgather(bytes(8), bytearray(16))",
    )
    assert outside(["-c", "; ".join(lines)], preloaded)[0] == ["Allgather_c"] * 2
