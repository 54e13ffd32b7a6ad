"""Plays one row: starts the job, lets the fault befall it at a drawn moment, and looks at how it ends."""

import re
import shutil
import time
from pathlib import Path

import numpy as np

from tests.command.launch import treeattn
from tests.fuzz import lines

from . import jobs, table


def prepared(folder: Path) -> Path:
    """With what the commands of the table read."""
    lines.seeds(folder)
    return folder


def befall(fault: table.Fault, command: str, launcher: str, folder: Path, seed: int) -> float:
    """The fault at a drawn moment of a command on three ranks. Returns the seconds until all was gone."""
    draw = np.random.default_rng([seed, *command.encode()])
    rank, moment = int(draw.integers(table.RANKS)), float(draw.uniform(0, 2.5))
    words = table.TOGETHER[command].format(tmp=folder).split()
    job = jobs.Job(jobs.started(launcher, table.RANKS, ["-m", "treeattn", *words]))
    with job:
        struck = job.ready(table.RANKS)
        time.sleep(moment)
        struck = struck and fault.strike(job, rank)
        took = job.ended(rank if fault.stops and struck else None)
    code, said = job.result
    told = f"rank {rank}, {moment:.1f} s, exit {code}:\n{said}"
    assert code in (0, *fault.codes), told
    assert code or not (fault.deadly and struck), told
    if code:
        assert struck, told
        unheard = launcher == "Open MPI" and code in (1, 137)  # it may let nothing through
        assert unheard or re.search(fault.sees.format(rank=rank), said), told
        assert "Traceback" not in said, told
    return took


def come_to_grief(grief: table.Grief, phase: str, launcher: str, folder: Path) -> float:
    """Rank 1 of a program in one of its phases. Returns the seconds until all was gone, and the start."""
    module = [] if launcher == "torchrun" else ["-m", "mpi4py"]
    program = [*module, jobs.ROOT / "tests/faults/program.py", grief.how, phase, folder]
    job = jobs.Job(jobs.started(launcher, 2, program, grief.hidden), PYTHONPATH=str(jobs.ROOT))
    with job:
        took = job.ended(1 if grief.how == "SIGSTOP" else None)
    code, said = job.result
    told = f"exit {code}:\n{said}"
    assert code, told
    assert re.search(grief.sees, said), told
    return took


def spoil(spoiled: table.Spoiled, command: str, folder: Path, seed: int) -> float:
    """A file changes at a drawn moment of a command. Returns the seconds until all of it was gone."""
    name, words = table.READERS[command]
    own = folder / "spoiled"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    for path in (jobs.ROOT / table.CACHE, *folder.glob("*.json"), *folder.glob("model-*")):
        shutil.copy(path, own)
    words = words.format(file=own / name, folder=own).split()
    job = jobs.Job(jobs.started("MPICH", table.RANKS, ["-m", "treeattn", *words]))
    with job:
        time.sleep(float(np.random.default_rng([seed, *command.encode()]).uniform(0.2, 1.5)))
        spoiled.spoil(own / name)
        took = job.ended()
    code, said = job.result
    told = f"exit {code}:\n{said}"
    assert code in (0, *spoiled.codes), told
    assert not code or re.search(spoiled.sees, said), told
    assert "Traceback" not in said, told
    return took


def on_a_full_disk(words: str, folder: Path, disk: Path, ranks: int | None) -> None:
    """One line, and nothing is left there but what rows are appended to: the same command goes on from it."""
    done = treeattn(*words.format(tmp=folder, disk=disk).split(), ranks=ranks, code=1)
    lines = [line for line in done.stderr.splitlines() if line.startswith("treeattn:")]
    assert lines, done.stderr
    assert all("No space left on device" in line and str(disk) in line for line in lines), done.stderr
    assert "Traceback" not in done.stderr
    left = [path for path in disk.rglob("*") if path.is_file() and path.name != "filled"]
    for path in disk.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    held = [path.read_bytes() for path in left if path.suffix == ".jsonl"]
    for path in left:
        path.unlink(missing_ok=True)
    assert len(left) == len(held), left
    assert not any(b"\n" in rows for rows in held), held  # none fits: a line that was cut off is left out
