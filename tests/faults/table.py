"""The table of faults: each row is a fault, where it befalls a job, and what one sees of it."""

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .jobs import Job

RANKS = 3

#: Who starts the ranks of a program; a command's are started by the first two.
LAUNCHERS = ("MPICH", "Open MPI", "torchrun")

CACHE = "tests/data/smollm2_layer17_4096.safetensors"
_SMALL = "--seq-len 512 --heads 4 --kv-heads 2 --head-dim 32"

#: Commands whose ranks wait for one another; {tmp} holds a model, drafts, and what is written.
TOGETHER = {
    "calibrate": "calibrate --seconds 2 --out {tmp}/prices.toml",
    "compare": f"compare --schemes chain,kv_ring {_SMALL} --repetitions 3",
    "decode": f"decode {CACHE} --check --repeat 200",
    "generate": "generate --model {tmp} --prompt-ids 1,2,3,4,5,6,7,8 -n 8",
    "paper": "paper latency",
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
    deadly: bool = False  #: a job with a rank that it struck cannot end well
    stops: bool = False  #: the rank stays, and goes on when the others have gone


def _signal(number: int) -> Callable[[Job, int], bool]:
    return lambda job, rank: job.signal(rank, number)


def _to_all(number: int) -> Callable[[Job, int], bool]:
    def strike(job: Job, _: int) -> bool:
        job.signal_all(number)
        return True

    return strike


_NOTHING = "what was written before; files are whole"
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
    Fault(
        "Ctrl-C", _to_all(signal.SIGINT), (130, 1, 2, 9), r"treeattn: interrupted: |signal 2|Errorcode: 143",
        "`treeattn: interrupted: kept FILE`, or `nothing was written`; Open MPI: `Errorcode: 143` alone",
        "results so far, and the same command goes on from there",
    ),
    Fault(
        "SIGTERM, as schedulers send it", _to_all(signal.SIGTERM), (143, 1, 15, 9),
        r"treeattn: ended by SIGTERM: |signal 15|Errorcode: 143",
        "`treeattn: ended by SIGTERM: kept FILE`; Open MPI: `Errorcode: 143` alone", "as after Ctrl-C",
    ),
)  # fmt: skip


def faults() -> Iterator[tuple[Fault, str, str]]:
    """Each fault of each command under each of the launchers that start it."""
    yield from itertools.product(FAULTS, TOGETHER, LAUNCHERS[:2])


#: Where rank 1 of a program that uses each class comes to grief, as `program.py` names it.
PHASES = (
    "planning", "a step", "between begin and finish", "decode", "merge", "prefill",
    "append", "a step of a cache", "save", "load", "verify", "accept", "cache nodes", "a plan of cache nodes",
    "a step of cache nodes", "a session", "a token", "close", "the end of the process",
)  # fmt: skip
#: Those of MPI alone.
CACHE_NODES = ("cache nodes", "a plan of cache nodes", "a step of cache nodes")

#: Before these only MPI itself still waits for rank 1, in the end of the process and without a limit.
AWAITED = PHASES[:-2]


@dataclass(frozen=True)
class Grief:
    """What rank 1 does in the middle of a program, and what is seen of it by every launcher."""

    name: str
    how: str
    hidden: bool  #: a shell around each rank keeps the launcher from noticing
    sees: str
    shown: str
    launchers: tuple[str, ...] = LAUNCHERS
    phases: tuple[str, ...] = PHASES


GRIEFS = (
    Grief("is killed", "SIGKILL", False, _LAUNCHERS, "the launcher's report of signal 9"),
    Grief(
        "is stopped", "SIGSTOP", False, rf"rank 1 is stopped|{_UNNAMED}",
        "`.. 3 s without ..: rank 1 is stopped`; in the first plan it has no name yet",
        phases=AWAITED,
    ),
    Grief("raises", "raise", False, r"what the program raises on one rank", "its own traceback"),
    Grief(
        "leaves early", "leave", True, r"rank 1 |without|PeerError",
        "`PeerError: .. rank 1 has ended`, or after the limit `.. 3 s without ..`",
        phases=AWAITED,
    ),
    Grief(
        "is on a node that is cut off", "cut", False, r"without", "`.. 3 s without ..`",
        launchers=("nodes",), phases=AWAITED,
    ),
)  # fmt: skip


def griefs() -> Iterator[tuple[Grief, str, str]]:
    """Each grief in each of its phases under each of its launchers."""
    for grief in GRIEFS:
        for phase, launcher in itertools.product(grief.phases, grief.launchers):
            if launcher != "torchrun" or phase not in CACHE_NODES:
                yield grief, phase, launcher


#: What the commands that write a file are started with, for a full disk under each of those files.
WRITERS = {
    "calibrate": "--seconds 1 --out {tmp}/prices.toml",
    "check-partials": "{tmp}/partial.safetensors",
    "compare": "--schemes chain --bytes 1Ki --repetitions 1",
    "decode": CACHE,
    "doctor": "",
    "generate": "--model {tmp} --prompt-ids 1,2,3,4,5,6,7,8 -n 2",
    "paper": "latency",
    "plot": "{tmp}/results.jsonl",
    "report": "{tmp}/results.jsonl",
    "roofline": "--repeat 1",
    "schedule": "ring --ranks 8",
    "schemes": "",
    "simulate": "--cluster dgx-h100 --ranks 16 --tokens 5120k",
    "tune": "--cluster dgx-h100 --ranks 16",
    "verify": "{tmp}/drafts.safetensors",
}
#: Options that name what a command writes, and files where their ending counts.
WRITES = ("--out", "--json")
FILES = {
    ("calibrate", "--out"): "prices.toml",
    ("compare", "--out"): "r.jsonl",
    ("plot", "--out"): "plot.svg",
    ("report", "--out"): "report.html",
    ("schedule", "--out"): "ring.svg --format svg",
    ("simulate", "--out"): "timeline.svg --format svg --schemes ring",
    ("tune", "--out"): "fastest.json",
}


@dataclass(frozen=True)
class Elsewhere:
    """A fault that another test does for real."""

    name: str
    shown: str
    test: str  #: FILE::FUNCTION in tests


ELSEWHERE = (
    Elsewhere(
        "a rank fails before MPI starts", "its error, exit code 1 of the job",
        "faults/test_before_mpi.py::test_what_fails_in_the_command_is_said",
    ),
    Elsewhere(
        "a job is killed while it saves a cache", "the cache before or the new one is there, whole",
        "unit/cache/test_saved.py::test_whenever_a_job_is_killed_there_is_the_old_cache_or_the_new_one",
    ),
    Elsewhere(
        "the process forks after use", "`StateError` of whatever communicates in the child",
        "mpi/test_threads.py::test_no_public_verb_serves_a_forked_process",
    ),
    Elsewhere(
        "a cache node is killed", "the launcher's report, or `rank 1 has ended`; what was saved is there",
        "command/test_cache_nodes.py::test_a_node_that_is_killed_ends_the_job",
    ),
    Elsewhere(
        "a job reaches its time limit under Slurm", "the same command goes on from what was measured",
        "slurm/test_jobs.py::test_a_job_cut_off_by_its_time_limit_goes_on",
    ),
    Elsewhere(
        "a node dies under Slurm", "the job ends, and goes on in another one",
        "slurm/test_jobs.py::test_a_job_survives_the_death_of_a_node",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Spoiled:
    """What is done to a file while a command reads it."""

    name: str
    spoil: Callable[[Path], object]
    codes: tuple[int, ...]  #: or 0 where it had been read before
    sees: str
    shown: str


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


#: The commands that read a file {file}, and which one.
READERS = {
    "decode": ("smollm2_layer17_4096.safetensors", "decode {file} --check"),
    "generate": ("model-00002-of-00002.safetensors", "generate --model {folder} --prompt-ids 1,2,3,4 -n 8"),
}
SPOILED = (
    Spoiled(
        "a file is cut off", _cut, (2, 7, 135), rf"not a readable|[Ss]ignal 7|Bus error|{_LAUNCHERS}",
        "`FILE: not a readable safetensors file`, or the launcher's report of signal 7: files are mapped",
    ),
)  # fmt: skip
