"""NCCL's sum by an algorithm that is named when the job is started; a stand-in writes NCCL's trace."""

import os
import subprocess
from types import SimpleNamespace

import made_results
import numpy as np
import pytest

from tests.unit.collectives.test_nccl_library import use
from tests.unit.jobs.test_scripts import JOBS
from treeattn.collectives.runtime import nccl
from treeattn.collectives.runtime.reducer import ReductionSpec
from treeattn.decoder import gpu_reducers
from treeattn.errors import ArgumentError, BackendError
from treeattn.study.compare import steps
from treeattn.study.compare.rows import NCCL_SUM, SUM
from treeattn.study.compare.sum_algorithm import sum_algorithm

ONE = SimpleNamespace(rank=0, size=1, allgather=lambda value: [value])
# As 2.24.3 and 2.30.7 print them (enqueue.cc), which write no other line for a sum with this subsystem alone.
TRACE = "node1:41:58 [0] NCCL INFO AllReduce: 8192 Bytes -> Algo {} proto {} channel{{Lo..Hi}}={{0..3}}\n"


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The environment of a job for ring/ll, as its script sets it."""
    lines = [line.strip() for line in (JOBS / "library_algorithm.sbatch").read_text().splitlines()]
    exports = "\n".join(line for line in lines if line.startswith("export NCCL"))
    text = f"words=(ring/ll) run={tmp_path}\n{exports}\nenv -0 | grep -z ^NCCL_"
    printed = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout
    for entry in filter(None, printed.split("\0")):
        monkeypatch.setenv(*entry.split("=", 1))
    monkeypatch.setattr("socket.gethostname", lambda: "node1.cluster")
    for cached in (sum_algorithm, nccl._library, nccl.problem):
        cached.cache_clear()
    yield tmp_path / f"nccl.node1.{os.getpid()}"
    sum_algorithm.cache_clear()


class Communicator:
    """Of NCCL, whose algorithm is that of the environment when it is made; a tuner may know better."""

    def __init__(self, trace, tuner):
        asked = os.environ.get("NCCL_ALGO", "allreduce:tree"), os.environ.get("NCCL_PROTO", "allreduce:LL128")
        self.trace = trace
        self.runs = [tuner or word.partition(":")[2].upper() for word in asked]
        self.aborted = False

    def all_reduce(self, array, operation):
        with self.trace.open("a") as file:
            file.write(TRACE.format(*self.runs))

    def abort(self):
        self.aborted = True


@pytest.fixture
def planned(started, monkeypatch):
    """Plans a sum; what its communicator runs."""

    def plan(algorithm, tuner=None):
        use(monkeypatch)
        made = []
        monkeypatch.setattr(
            gpu_reducers,
            "connected_by_nccl",
            lambda *_: made.append(Communicator(started, tuner)) or made[0],
        )
        (key,) = made_results.keys([f"{SUM}{algorithm}"], [0], device="cuda", transport="nccl")
        assert key.label == f"{NCCL_SUM}{algorithm}"
        steps.library_sum(key, ReductionSpec(ONE, None, np.zeros(9, np.float32), SimpleNamespace()))
        return made[0]

    return plan


def test_the_variables_of_the_job_are_there_for_the_sum_by_the_algorithm_alone(planned, started):
    assert planned("/ring/ll").runs == ["RING", "LL"]
    assert planned("").runs == ["TREE", "LL128"]
    assert planned("/ring/ll").runs == ["RING", "LL"]
    assert started.read_text().count("Algo RING proto LL ") == 2


@pytest.mark.parametrize("tuner", ["TREE", ""])
def test_what_the_trace_does_not_name_has_no_row(tuner, planned, started, monkeypatch):
    """A tuner's choice; or a trace that is not where the job said, such as a folder that is full."""
    if not tuner:
        monkeypatch.setattr(Communicator, "all_reduce", lambda *_: None)
    with pytest.raises(BackendError, match=f"names {'tree/tree' if tuner else 'no sum'} where ring/ll"):
        planned("/ring/ll", tuner)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("NCCL_ALGO", "allreduce:tree"), ("NCCL_PROTO", None), ("NCCL_DEBUG", "WARN")],
)
def test_a_job_that_was_not_started_for_it_is_refused(variable, value, started, monkeypatch):
    use(monkeypatch)
    monkeypatch.setenv(variable, value) if value else monkeypatch.delenv(variable)
    with pytest.raises(ArgumentError, match=f"{variable}=.*jobs/library_algorithm.sbatch ring/ll"):
        sum_algorithm("ring/ll")


def test_an_nccl_without_names_in_its_trace_and_none_at_all_are_refused(started, monkeypatch):
    use(monkeypatch, get_version=22304)
    with pytest.raises(ArgumentError, match=r"needs NCCL 2\.24"):
        sum_algorithm("ring/ll")
    nccl.problem.cache_clear(), nccl._library.cache_clear()
    use(monkeypatch, available=False)
    with pytest.raises(ArgumentError, match=r"needs NCCL 2\.24.*no NCCL"):
        sum_algorithm("ring/ll")
