"""What ends a command from outside: Ctrl-C, a full disk, a pipe that nobody reads."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.drawn import sample
from treeattn import files
from treeattn.study.compare.rows import read

from .launch import CACHE, ROOT, mpirun, run, started, treeattn

FOREVER = ("decode", CACHE, "--repeat", 10**8)
COMPARE = ("compare", "--schemes", "ring", "--bytes", 288, "--head-dim", 16)


def interrupted(words, ranks, ready):
    """The command, given Ctrl-C as a terminal does, to all its processes, when `ready` says so."""
    # Started in the background, as CI may be, a shell lets its children ignore Ctrl-C; a terminal does not.
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    with started("-m", "treeattn", *words, ranks=ranks) as process:
        signal.signal(signal.SIGINT, was)
        ready(process)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=300)
    lines = {line for line in err.splitlines() if line.startswith("treeattn:")}  # two ranks may say the same
    return process.returncode, lines, err


def steps_are_told(process):
    """Until the first line of progress."""
    assert "of 100,000,000 steps" in process.stderr.readline()


@pytest.mark.parametrize("ranks", [pytest.param(None, marks=pytest.mark.deep), 3])
def test_nothing_was_written(ranks):
    code, lines, err = interrupted(FOREVER, ranks, steps_are_told)
    assert (code, lines) == (130, {"treeattn: interrupted: nothing was written"})
    assert "Traceback" not in err


@pytest.mark.parametrize("ranks", [None, 2])
def test_what_is_kept_is_named(ranks, tmp_path):
    out = tmp_path / "r.jsonl"

    def blocks_are_kept(process):
        while not (out.exists() and out.stat().st_size > 10_000) and process.poll() is None:
            time.sleep(0.02)

    words = (*COMPARE, "--repetitions", 10_000, "--out", out)
    code, lines, err = interrupted(words, ranks, blocks_are_kept)
    wanted = f"treeattn: interrupted: kept {out} (the same command goes on from there)"
    assert (code, lines) == (130, {wanted})
    assert "Traceback" not in err
    assert read(out)


ONE_RANK = """
import os, signal, sys, time
number = int(sys.argv.pop(1))
signal.signal(number, signal.SIG_DFL)  # where these tests run in the background
from treeattn import cli
from treeattn.cli import compare

def sweep(world, *_):
    try:
        if world.rank == 1:
            os.kill(os.getpid(), number)
            time.sleep(60)
        world.recv(source=1)
    finally:
        world.barrier()  # as closing is collective

compare.sweep = sweep
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGINT, "interrupted"),
        (signal.SIGTERM, "ended by SIGTERM"),
        (signal.SIGHUP, "ended by SIGHUP"),
    ],
)
def test_a_rank_that_is_interrupted_alone_knows_what_is_kept(tmp_path, number, how):
    """Though libraries under MPI take signals for themselves."""
    out = tmp_path / "r.jsonl"
    done = run("-c", ONE_RANK, int(number), *COMPARE, "--out", out, ranks=2, code=128 + number)
    assert f"treeattn: {how}: kept {out} (the same command goes on from there)" in done.stderr


def test_an_import_that_is_interrupted():
    """An extension module makes an ImportError of it."""
    program = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # where these tests run in the background
from treeattn.cli import commands, main
@commands.command("slow")
def slow():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except BaseException as error:
        raise ImportError("initialization failed") from error
commands.list_commands = lambda ctx: ["slow"]
commands.get_command = lambda ctx, name: slow
main()
"""
    done = run("-c", program, "slow", code=130)
    assert done.stderr == "treeattn: interrupted: nothing was written\n"


def shell(line, cwd):
    """What bash makes of a line; "$@" is the command."""
    done = subprocess.run(
        ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}", "sh", sys.executable, "-m", "treeattn"], cwd=cwd,
        capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


FULL_DISK = "treeattn: standard output: No space left on device; print to another place\n"
ALONE = ("--help", "schemes", "doctor", "schedule ring --ranks 50", f"decode {CACHE} --repeat 1")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    ("line", "code", "out", "err"),
    [
        *sample(2, [(f'"$@" {words} > /dev/full', 1, "", FULL_DISK) for words in ALONE]),
        ('"$@" schedule ring --ranks 100 | head -n 1', 0, "ring, 100 ranks\n", ""),  # a reader that leaves
        ('"$@" nonsense > /dev/full', 2, "", None),  # what nobody takes changes no verdict
        (f'"$@" decode {CACHE} --repeat 1 --expect other.safetensors | true', 1, "", None),
        (f'{{mpirun}} sh -c \'exec "$0" "$@" > /dev/full\' "$@" {ALONE[-1]}', 1, "", None),
    ],
)  # fmt: skip
def test_output_that_cannot_be_written(tmp_path, line, code, out, err):
    expected = files.open_cache(CACHE.with_suffix(".expected.safetensors")).tensors
    other = {name: np.array(tensor) + 1 for name, tensor in expected.items()}
    (tmp_path / "other.safetensors").write_bytes(files.save_tensors(other, {}))
    line = line.replace("{mpirun}", shlex.join(mpirun(2)) if "{mpirun}" in line else "")
    found = shell(line, tmp_path)
    assert found[:2] == (code, out), found
    assert err in (None, found[2])
    assert found[2].count("standard output") == (err == FULL_DISK or "-n 2" in line)
    assert "Traceback" not in found[2]


def test_the_device_of_a_full_disk_is_no_file():
    done = treeattn("schemes", "--json", "/dev/full", code=2)
    assert done.stderr == "treeattn: /dev/full: is not an ordinary file; name a file to write\n"


SIGNALLED_LATE = """
import os, signal, time
from treeattn.cli import main
from treeattn.collectives.runtime import watchdog
finalize = watchdog.finalize_mpi

def last(call):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)
    finalize(call)

watchdog.finalize_mpi = last
main(["decode", "none.safetensors"])
"""


def test_a_rank_that_is_ended_while_it_leaves_keeps_its_code():
    """As srun ends those that still leave when the first one has left with a code."""
    done = run("-c", SIGNALLED_LATE, ranks=2, code=2)
    assert "ended by SIGTERM" not in done.stderr
