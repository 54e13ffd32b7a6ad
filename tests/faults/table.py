"""The table of faults: each row is a fault, where it befalls a job, and what one sees of it."""

from __future__ import annotations

import itertools
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .jobs import LIMIT, Job

RANKS = 3

CACHE = "tests/data/smollm2_layer17_4096.safetensors"
_SMALL = "--seq-len 512 --heads 4 --kv-heads 2 --head-dim 32"

#: Commands whose ranks wait for one another; {tmp} holds a model, drafts, and what is written.
TOGETHER = {
    "audit": "audit {tmp}/run.json",
    "calibrate": "calibrate --seconds 2 --out {tmp}/prices.toml",
    "compare": f"compare --schemes chain,kv_ring --what decode {_SMALL} --repetitions 3",
    "decode": f"decode {CACHE} --check --repeat 200",
    "generate": "generate --model {tmp} --random-tokens 40 -n 8",
    "paper": "paper latency",
    "topology": "topology",
    "trace": "trace hierarchical --out {tmp}/trace.json",
    "verify": "verify {tmp}/drafts.safetensors",
}


@dataclass(frozen=True)
class Fault:
    """What is done to one rank, or to all, of a running job; and what is then seen."""

    name: str
    strike: Callable[[Job, int], bool]  #: whether there was something left to hurt
    codes: tuple[int, ...]  #: the job's exit code is one of these, or 0 where it had ended before
    sees: str  #: a pattern of what is said on standard error, unless the code is 0
    shown: str  #: the same as one reads it
    kept: str
    limit: int = LIMIT  #: seconds that a wait may take
    deadly: bool = False  #: a job with a rank that it struck cannot end well
    stops: bool = False  #: the rank stays, and goes on when the others have gone


def _signal(number: int) -> Callable[[Job, int], bool]:
    return lambda job, rank: job.signal(rank, number)


def _to_all(number: int) -> Callable[[Job, int], bool]:
    def strike(job: Job, _: int) -> bool:
        job.signal_all(number)
        return True

    return strike


def _slowed(job: Job, rank: int) -> bool:
    """Half of the time, for some seconds, and never as long as a wait may take."""
    for number in (signal.SIGSTOP, signal.SIGCONT) * 8:
        if not job.signal(rank, number):
            return False
        time.sleep(0.3)
    return True


def _without_memory(job: Job, rank: int) -> bool:
    """From now on every allocation of address space fails."""
    process = job.ranks().get(rank)
    if process is None:
        return False
    try:
        resource.prlimit(process, resource.RLIMIT_AS, (1, 1))
    except ProcessLookupError:
        return False
    return True


_NOTHING = "what was written before; a file is written whole or not at all"
_LAUNCHERS = r"BAD TERMINATION|[Ss]ignal 9|KILLED BY SIGNAL|ended|EXIT STRING|exitcode: -9"
_UNNAMED = "looking for the nodes: 3 s without the other"  # in the first plan no rank has a name yet

#: What can befall every command of several ranks.
FAULTS = (
    Fault(
        "a rank is killed", _signal(signal.SIGKILL), (1, 9, 137), _LAUNCHERS,
        "the launcher's report of signal 9, or `rank 1 has ended, while this one waits`", _NOTHING,
        deadly=True,
    ),
    Fault(
        "a rank is stopped", _signal(signal.SIGSTOP), (124, 9), r"rank {rank} is stopped",
        "`.. 3 s without ..: rank 1 is stopped (process 4711); if steps take so long, set ..`", _NOTHING,
        stops=True,
    ),
    Fault("a rank is slowed, half of the time", _slowed, (0,), "", "nothing", "everything", limit=60),
    Fault(
        "a rank gets no more memory", _without_memory, (1, 2, 9, 124, 134, 137, 139),
        r"treeattn: |rror|EXIT STRING|[Mm]emory",
        "`rank 1 of 3 failed, ending the job: MemoryError`, or what a library says of it", _NOTHING,
    ),
    Fault(
        "Ctrl-C", _to_all(signal.SIGINT), (130, 2, 9), r"treeattn: interrupted: |signal 2",
        "`treeattn: interrupted: kept FILE`, or `nothing was written`",
        "results so far, and the same command goes on from there",
    ),
    Fault(
        "SIGTERM, as schedulers send it", _to_all(signal.SIGTERM), (143, 15, 9),
        r"treeattn: ended by SIGTERM: |signal 15",
        "`treeattn: ended by SIGTERM: kept FILE`", "as after Ctrl-C",
    ),
    Fault(
        "SIGHUP, as a terminal that closes sends it", _to_all(signal.SIGHUP), (129, 1, 9), "",
        "`treeattn: ended by SIGHUP: kept FILE`, unless the launcher goes first; under nohup nothing",
        "as after Ctrl-C",
    ),
)  # fmt: skip

#: Where rank 1 of a program that uses each class comes to grief, as `program.py` names it.
PHASES = (
    "planning", "a step", "between begin and finish", "decode", "merge", "prefill", "a step of a cache",
    "save", "load", "verify", "close", "the end of the process",
)  # fmt: skip

#: Who starts the ranks of that program.
LAUNCHERS = ("MPICH", "Open MPI", "torchrun")


@dataclass(frozen=True)
class Grief:
    """What rank 1 does in the middle of a program, and what is seen of it by every launcher."""

    name: str
    how: str
    hidden: bool  #: a shell around each rank keeps the launcher from noticing
    sees: str
    shown: str


GRIEFS = (
    Grief("is killed", "SIGKILL", False, _LAUNCHERS, "the launcher's report of signal 9"),
    Grief(
        "is killed, and a shell hides it from the launcher", "SIGKILL", True,
        rf"failed: |{_LAUNCHERS}|{_UNNAMED}",
        "`PeerError: .. rank 1 has ended, while this one waits`, unless MPICH's launcher is faster",
    ),
    Grief(
        "is stopped", "SIGSTOP", False, rf"rank 1 is stopped|{_UNNAMED}",
        "`.. 3 s without ..: rank 1 is stopped`; in the first plan it has no name yet",
    ),
    Grief("raises", "raise", False, r"what the program raises on one rank", "its own traceback"),
    Grief("leaves early", "leave", True, r"rank 1 |without ", "`.. without ..: rank 1 is at its end`"),
)  # fmt: skip

#: Before these only MPI itself still waits for rank 1, in the end of the process and without a limit.
UNAWAITED = ("close", "the end of the process")


def griefs() -> Iterator[tuple[Grief, str, str]]:
    """Each grief in each phase under each launcher, but for what has no end or hides nothing."""
    for grief, phase, launcher in itertools.product(GRIEFS, PHASES, LAUNCHERS):
        endless = grief.how == "SIGSTOP" and phase in UNAWAITED
        noticed = grief.how == "SIGKILL" and grief.hidden and launcher == "torchrun"  # starts no shell
        if not endless and not noticed:
            yield grief, phase, launcher


#: What the commands that write a file are started with, for a full disk under each of those files.
WRITERS = {
    "audit": "{tmp}/run.json",
    "calibrate": "--seconds 1 --out {tmp}/prices.toml",
    "check-partials": "{tmp}/partial.safetensors",
    "compare": f"--schemes chain --what reduce {_SMALL} --repetitions 1 --iterations 3",
    "decode": CACHE,
    "doctor": "",
    "export": "{tmp}/results.jsonl --format csv",
    "generate": "--model {tmp} --random-tokens 40 -n 2",
    "inspect": "--model {tmp}",
    "paper": "latency",
    "plot": "{tmp}/results.jsonl",
    "published": "",
    "report": "{tmp}/results.jsonl",
    "roofline": "--repeat 1",
    "schedule": "ring --ranks 8",
    "schemes": "",
    "simulate": "--cluster dgx-h100 --ranks 16 --tokens 5120k",
    "topology": "",
    "trace": "hierarchical",
    "tree": "{tmp}/beams.txt",
    "tune": "--cluster dgx-h100 --ranks 16",
    "verify": "{tmp}/drafts.safetensors",
    "visible": "",
}
#: Options that name what a command writes, and files where their ending counts.
WRITES = ("--out", "--json", "--save-cache")
FILES = {
    ("calibrate", "--out"): "prices.toml",
    ("trace", "--out"): "trace.json",
    ("compare", "--out"): "r.jsonl",
    ("plot", "--out"): "plot.svg",
    ("published", "--out"): "prices.toml --run 2025_03_16___14_58_59",
    ("report", "--out"): "report.html",
    ("schedule", "--out"): "ring.svg --format svg",
    ("simulate", "--out"): "timeline.svg --format svg --schemes ring",
    ("tree", "--out"): "tree.svg --format svg",
    ("tune", "--out"): "fastest.json",
    ("visible", "--out"): "visible.svg --format svg",
}
