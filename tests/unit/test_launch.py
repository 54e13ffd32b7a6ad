"""What the variables of launchers say, and what is said where they say something else than MPI."""

import os
import shutil
import socket
import subprocess
import sys
import types

import pytest

from treeattn.mpi import launch, library

STARTERS = (
    *("PMI", "OMPI_", "SLURM", "MPI_", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC", "FLUX"),
    *("PALS", "JSM"),
)


@pytest.fixture
def environment(monkeypatch):
    """Sets variables, with none of a launcher of the tests."""
    for name in [name for name in os.environ if name.startswith(STARTERS)]:
        monkeypatch.delenv(name)

    def set_all(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


MPIRUN = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "16"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
MPIEXEC = {"PMI_RANK": "2", "PMI_SIZE": "3"}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}


@pytest.mark.parametrize(
    ("variables", "announced"),
    [
        ({}, (0, 1)),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, (1, 4)),
        (MPIRUN, (2, 16)),
        (SRUN, (3, 8)),
        (TORCHRUN, (1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (0, 1)),  # as anything may call its variables
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "6"}, (1, 6)),
        ({"PALS_RANKID": "4", "PMI_SIZE": "5"}, (4, 5)),
        ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "3"}, (1, 3)),
        ({**SRUN, **TORCHRUN}, (1, 2)),  # srun torchrun, on each node
        ({"PMIX_RANK": "2"}, (2, 3)),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", **SRUN}, (1, 4)),  # mpiexec, whose proxies srun started
        ({**MPIRUN, "PMI_RANK": "0", "PMI_SIZE": "4"}, (2, 16)),  # below tasks of srun
        ({"PMI_RANK": "0", "PMI_SIZE": "1", **SRUN}, (3, 8)),
        ({"PMI_RANK": "0", "PMI_SIZE": ""}, (0, 1)),
        ({"PMI_RANK": "0", "PMI_SIZE": "x", "PMIX_RANK": "-1"}, (0, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1)),  # the batch script itself
    ],
)  # fmt: skip
def test_rank_and_size_that_were_announced(variables, announced):
    assert launch.launched_as(variables) == announced


@pytest.fixture
def above(monkeypatch):
    """Called with the environments of processes 100, 101, .. above this one, and the names of some."""

    def above(*environments, names=(), started=()):
        told = dict(enumerate(environments, 100))
        monkeypatch.setattr(launch, "_above", lambda: iter(told))
        monkeypatch.setattr(launch, "_environment", lambda process: told[process])
        monkeypatch.setattr(launch, "_name", lambda process: dict(names).get(process, "sh"))
        monkeypatch.setattr(launch, "_started_by", lambda process: started)

    return above


@pytest.mark.parametrize(
    ("own", "environments", "python", "launched"),
    [
        (TORCHRUN, [{}], (), ("torchrun", 1, 2)),
        (TORCHRUN, [TORCHRUN, {}], (), ("torchrun", 1, 2)),  # a shell of the rank
        (TORCHRUN, [TORCHRUN, {}], (100,), ("", 0, 1)),  # what a rank starts
        (TORCHRUN, [TORCHRUN, TORCHRUN, {}], (101,), ("", 0, 1)),  # by a shell
        (TORCHRUN, [{}, {}], (100, 101), ("torchrun", 1, 2)),  # torchrun runs Python, too
        ({**TORCHRUN, "RANK": "0"}, [TORCHRUN, {}], (100,), ("torchrun", 0, 2)),  # a rank that starts ranks
        ({**TORCHRUN, **MPIEXEC}, [TORCHRUN, TORCHRUN, {}], (101,), ("mpiexec", 2, 3)),
        ({**TORCHRUN, **MPIEXEC}, [MPIEXEC, {}], (), ("torchrun", 1, 2)),
        ({**TORCHRUN, "PMI_RANK": "0", "PMI_SIZE": "1"}, [TORCHRUN, {}], (100,), ("", 0, 1)),
        ({**SRUN, **MPIEXEC}, [SRUN, {}], (), ("mpiexec", 2, 3)),
        ({**SRUN, **MPIEXEC}, [MPIEXEC, MPIEXEC, {}], (), ("srun", 3, 8)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}, [{}], (), ("", 0, 1)),
        ({**TORCHRUN, **SRUN}, [], (), ("torchrun", 1, 2)),  # where no other process is to be seen
    ],
)
def test_the_innermost_launcher_counts(own, environments, python, launched, environment, above, monkeypatch):
    environment(**own)
    above(*environments)
    monkeypatch.setattr(launch, "_runs_python", lambda process: process in python)
    assert launch.launched() == launched


MISSING = "the launcher's environment does not arrive here: pass it on (no --cleanenv, no env -i)"
ANOTHER = "use the mpiexec of that one"
THREE = {"started": [7, 8, 9]}


@pytest.mark.parametrize(
    ("own", "environments", "more", "ranks", "said"),
    [
        (SRUN, [], {}, 1, ("the launcher started 8 processes but MPI sees one", "srun --mpi=pmi2 for MPICH")),
        ({**SRUN, "PMI_RANK": "0", "PMI_SIZE": "8"}, [], {}, 1, ("8 processes but", "--mpi=pmix for Open")),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, [], {}, 1, ("4 processes but MPI sees one", ANOTHER)),
        ({**SRUN, **MPIEXEC, "MPI_LOCALNRANKS": "2"}, [], {}, 1, ("3 processes but MPI sees one", ANOTHER)),
        (SRUN, [{}], {}, 2, ("the launcher started 8 processes but MPI sees 2", "srun --mpi=pmi2")),
        (SRUN, [{}], {}, 8, None),
        (SRUN, [{}], {}, 9, None),  # components of one job, each of which has a number of its own
        (TORCHRUN, [{}], {}, 1, ("torchrun started 2 processes, and this one is in no process group",
                                 "call torch.distributed.init_process_group first, or pass comm=")),
        ({}, [{"HOME": "/"}, SRUN], {}, 1, ("one of 8 processes, each of which would be rank 0", MISSING)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, [{"PMI_RANK": "0", "PMI_SIZE": "1"}], {}, 1, None),
        # Out of a user namespace, as containers without root have it, only the names of processes show.
        *(({}, [{}, {}], {"names": {101: name}, **THREE}, 1, ("one of 3 processes, each", MISSING))
          for name in ("hydra_pmi_proxy", "prted", "slurmstepd")),
        ({}, [{}, {}], {"names": {101: "prted"}, "started": [7]}, 1, None),
        # mpiexec -n 1 of Open MPI in a job of two nodes: srun, for the agent of the other one, is its child.
        ({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1"}, [{}], {"names": {100: "prterun"}, **THREE}, 1, None),
    ],
)  # fmt: skip
def test_a_process_that_mpi_does_not_find_as_it_was_started(
    own, environments, more, ranks, said, environment, above
):
    environment(**own)
    above(*environments, **more)
    problem = launch.problem(ranks)
    assert (problem is None) == (said is None)
    for text, words in zip(problem or (), said or (), strict=True):
        assert words in text


def test_a_process_of_python_is_known_as_such():
    assert launch._runs_python(os.getpid())
    with subprocess.Popen(["sleep", "60"]) as started:
        assert not launch._runs_python(started.pid)
        started.kill()


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (("/opt/bin/mpiexec", "-n", "2", "program", "-n", "7"), 2),
        (("bash", "/opt/bin/mpirun", "-np", "12", "program"), 12),
        (("mpiexec", "-n", "1", "program", ":", "-n", "3", "other"), 1),
        (("mpiexec", "--bind-to", "core", "-n", "2", "program"), 0),
        (("program", "-n", "3"), 0),
        (("mpiexec",), 0),
    ],
)
def test_what_a_launcher_was_asked_for(words, number, environment, monkeypatch):
    """Ranks that have ended are no longer below it: those that come later are told by its command line."""
    monkeypatch.setattr(launch, "_said", lambda process, what: "\0".join([*words, ""]))
    assert launch._asked_for(7) == number


def test_the_processes_above_and_below_are_those_of_the_system():
    assert next(launch._above(), 1) == os.getppid()  # the first process counts as nobody's parent
    with subprocess.Popen(["sleep", "60"]) as started:
        assert started.pid in launch._started_by(os.getpid())
        assert launch._parent(started.pid) == os.getpid()
        started.kill()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, None),
        ({"SLURM_CONF": "/etc/slurm/slurm.conf"}, "outside of any job of this Slurm cluster"),
        ({"SLURM_JOB_ID": "7"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, "one process in a job of 8 tasks"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", **SRUN}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", **MPIRUN, "OMPI_COMM_WORLD_SIZE": "1"}, None),
    ],
)
def test_beside_a_job(variables, words, environment, monkeypatch):
    environment(**variables)
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/srun")
    monkeypatch.setattr(launch, "_SLURM_FILES", ())
    said = launch.outside_job()
    assert said is None if words is None else words in (said or "")


def test_programs_of_slurm_without_a_cluster(environment, monkeypatch):
    environment(SLURM_CONF="/etc/slurm/slurm.conf")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert launch.outside_job() is None


def test_a_library_that_is_just_being_imported_has_not_started(monkeypatch):
    """A signal that ends the job may come then."""
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.ModuleType("mpi4py.MPI"))
    assert not library.started()


def test_a_launcher_is_asked_to_end_the_job_at_its_socket_alone(environment, tmp_path):
    ours, theirs = socket.socketpair()
    with ours, theirs, (tmp_path / "file").open("w") as file:
        environment(PMI_FD=str(file.fileno()))  # a number that this process uses for something else
        launch.abort(3)
        environment(PMI_FD="none")
        launch.abort(4)
        environment(PMI_FD=str(ours.fileno()))
        launch.abort(5)
        assert theirs.recv(100) == b"cmd=abort exitcode=5\n"
    assert (tmp_path / "file").read_bytes() == b""
