"""Every row of the table, done for real; `make faults` notes how long they take."""

import os
import subprocess

import click
import pytest

from treeattn.cli import commands

from . import jobs, play, table

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(jobs.lacking("MPICH") is not None, reason=str(jobs.lacking("MPICH"))),
]

FACTOR = int(os.environ.get("TREEATTN_TEST_FACTOR", "1"))


def needs(launcher: str) -> list[pytest.MarkDecorator]:
    lacking = jobs.lacking(launcher)
    return [pytest.mark.skip(reason=lacking)] if lacking else []


ROWS = [
    pytest.param(*row, seed, marks=needs(row[2]), id=f"{row[0].name}-{row[1]}-{row[2]}-{seed}")
    for row in table.faults()
    for seed in range(FACTOR)
]
GRIEFS = [
    pytest.param(*row, marks=needs(row[2]), id=f"{row[0].name}-{row[1]}-{row[2]}") for row in table.griefs()
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


@pytest.mark.parametrize(("fault", "command", "launcher", "seed"), ROWS)
def test_a_command(folder, took, fault, command, launcher, seed):
    took(fault.name, play.befall(fault, command, launcher, folder, seed))


@pytest.mark.parametrize("seed", range(3 * FACTOR))
@pytest.mark.parametrize("command", table.READERS)
@pytest.mark.parametrize("spoiled", table.SPOILED, ids=lambda spoiled: spoiled.name)
def test_a_file_that_is_read(folder, took, spoiled, command, seed):
    took(spoiled.name, play.spoil(spoiled, command, folder, seed))


@pytest.mark.parametrize(("grief", "phase", "launcher"), GRIEFS)
def test_a_program(folder, took, grief, phase, launcher):
    took(grief.name, play.come_to_grief(grief, phase, launcher, folder))


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
