"""Processes started as ranks that do not find each other, or with command lines of their own: all commands
say so, and none prints a table."""

import os
import shlex
import subprocess
import sys

import pytest

from tests.support.drawn import sample
from tests.support.torchrun import needs_torch

from .launch import CACHE, ROOT, in_process, mpirun, treeattn

COMMANDS = (
    *(f"decode {CACHE}", "compare --schemes ring", "paper", "generate --model M --prompt-ids 1", "schemes"),
    *("schedule ring --ranks 3", "roofline --tokens 1k"),
)
# As `srun --mpi=none -n 4` starts each of its tasks.
NO_PLUG_IN = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
def test_srun_without_a_plug_in(command):
    done = in_process(*command.split(), **NO_PLUG_IN, code=1)
    assert done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("treeattn: ")]
    assert line.startswith("treeattn: the launcher started 4 processes")
    assert "srun --mpi=pmi2 for MPICH and Intel MPI, --mpi=pmix for Open MPI" in line


def test_doctor_tells_it_in_its_table():
    done = in_process("doctor", code=1, **NO_PLUG_IN)
    assert "this job broken the launcher started 4 processes" in done.said
    assert "srun's plug-in is not the one" in done.said


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
def test_help_is_given_to_whoever_was_started(command):
    assert "Usage:" in in_process(command.split()[0], "--help", **NO_PLUG_IN).stdout


@pytest.mark.parametrize("words", ["--version", "decode --help"])
def test_one_rank_alone_may_ask(words):
    alone = '[ "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" = 1 ] || "$@"'
    asks = ("sh", "-c", alone, "sh", sys.executable, "-m", "treeattn", *words.split())
    done = subprocess.run(
        [*mpirun(2), *asks], cwd=ROOT, capture_output=True, text=True, timeout=120,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) >= 1


@needs_torch
def test_ranks_of_torchrun_that_find_no_others():
    """One sentence of whoever cannot make the group, and no traceback."""
    left_over = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": ""}
    assert treeattn("--version", **left_over).stdout.startswith("treeattn, version")
    (line,) = treeattn("decode", CACHE, **left_over, code=1).stderr.splitlines()
    assert line.startswith("treeattn: rank 0: the 2 ranks of torchrun make no process group: ")
    assert "MASTER_ADDR" in line


def test_only_the_first_speaks():
    done = treeattn("decode", CACHE, **{**NO_PLUG_IN, "SLURM_PROCID": "2"}, code=1)
    assert done.stdout == ""
    assert "the launcher started" not in done.stderr


def test_a_login_node(tmp_path):
    """Programs of Slurm and its configuration are there, a job is not: said beside every time."""
    (tmp_path / "srun").symlink_to("/bin/false")
    login = {"SLURM_CONF": "/nowhere/slurm.conf", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = in_process("doctor", **login)
    assert "this job slow outside of any job of this Slurm cluster" in done.said
    done = in_process("decode", CACHE, "--repeat", 1, **login)
    assert "note: outside of any job of this Slurm cluster" in done.said


DECODE = f"decode {CACHE} --repeat 2"
CALIBRATE = "calibrate --out a.toml --seconds 1"


@pytest.mark.parametrize(
    ("command", "other", "says"),
    sample(2, [
        *((DECODE, other, "the command line differs between ranks") for other in
          ("--layout zigzag", "--repeat 3", "--scheme chain", "--check")),
        *((CALIBRATE, other, "the command line differs between ranks") for other in
          ("--seconds 3", "--executor mpi", "--out b.toml")),
        (DECODE, "--layout spiral", "unknown layout 'spiral'"),
    ]),
)  # fmt: skip
def test_ranks_that_were_told_different_things(command, other, says, tmp_path):
    """They would read other tokens, take other steps, or wait for each other without end."""
    second = (":", "-n", 1, sys.executable, "-m", "treeattn", *shlex.split(command), *other.split())
    done = treeattn(*shlex.split(command), *second, ranks=1, cwd=tmp_path, PYTHONPATH=str(ROOT), code=2)
    assert done.stderr.count(says) == 1
    assert not list(tmp_path.iterdir())
