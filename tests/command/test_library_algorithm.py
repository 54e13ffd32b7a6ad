"""``treeattn compare --library-algorithm``: an algorithm of the MPI library's own sum, or an error."""

import json
import re
import subprocess
import sys

import pytest

from treeattn.errors import ArgumentError
from treeattn.study.compare.rows import SUM, read
from treeattn.study.compare.sum_algorithm import sum_algorithm
from treeattn.study.compare.summary import summarise

from .launch import ROOT, in_process, run

JOB = ROOT / "jobs/library_algorithm.sbatch"
SET = dict(re.findall(r"(\w+)=(\S+)", "".join(re.findall("^ *export .*", JOB.read_text(), re.M))))
# A sum on 4 ranks, of which a ring makes other bits than what the library chooses.
BITS = """
import contextlib, hashlib, json, numpy, pytest
from msgspec import structs
from unittest import mock
from treeattn.mpi import communicators, library
from treeattn.study.compare.sum_algorithm import sum_algorithm
from treeattn.study.compare import rows, steps
comm, sums = communicators.mpi_intracomm(None, "sums"), []
sum_algorithm("ring")
key = rows.Key("reduce", rows.SUM + "/ring", comm.size, 0, 1, 1, 1, 1, 1, "float32")
with pytest.raises(ValueError, match="3 elements are fewer than 4 ranks"):
    steps.plan(comm, key, {})
with mock.patch.object(steps, "_sum", side_effect=KeyError), contextlib.suppress(KeyError):
    steps.plan(comm, structs.replace(key, head_dim=8), {})
for name in (rows.SUM, rows.SUM + "/ring", rows.SUM):
    with steps.plan(comm, rows.Key("reduce", name, comm.size, 0, 1, 1, 4, 4, 126, "float32"), {}):
        own, total = library.load().COMM_WORLD.Dup(), numpy.empty(4096)
        own.Allreduce(numpy.random.default_rng(own.rank).standard_normal(4096), total)
        own.Free()
    sums.append(hashlib.sha256(total.tobytes()).hexdigest())
comm.rank or print(json.dumps(sums))
"""


def started_for(name):
    return {variable: value.replace("${words[0]}", name) for variable, value in SET.items()}


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_the_algorithm_that_is_named_is_the_one_that_runs(nodes):
    """On two nodes MPICH's choice stands above all of them, unless it is told otherwise."""
    done = run("-c", BITS, ranks=4, MPIR_CVAR_NUM_CLIQUES=nodes, **started_for("ring"))
    before, ring, after = json.loads(done.stdout)
    assert before == after != ring


@pytest.mark.parametrize(
    ("name", "started"),
    [("ring", "auto"), ("sorcery", "sorcery"), ("auto", "auto")],
)
def test_what_may_be_another_algorithm_has_no_row(name, started, tmp_path):
    words = ("compare", "--library-algorithm", name, "--bytes", "1Ki", "--out", tmp_path / "r.jsonl")
    assert run("-m", "treeattn", *words, ranks=2, code=None, **started_for(started)).returncode
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["segmented_ring", "ccl", "4"])
def test_what_libraries_replace_is_refused_by_its_name(name):
    with pytest.raises(ArgumentError, match=f"^algorithm {name} (needs|is a number)"):
        sum_algorithm(name)


def test_a_report_of_two_jobs_has_the_ratio_to_the_sum_of_each(tmp_path):
    ratios, names = {}, ("ring", "recursive_doubling")
    for name in names:
        facts = tmp_path / f"{name}.json"
        words = ("--bytes", "1Ki", "--repetitions", "6", "--json", facts)
        environment = {"TREEATTN_RUN": tmp_path / name, "PATH": f"{sys.exec_prefix}/bin:/usr/bin:/bin"}
        command = ["bash", JOB.with_name("mpirun_local.sh"), "2", JOB, name, *words]
        subprocess.run(command, check=True, env=environment, timeout=300)
        found = {one["label"]: one for one in json.loads(facts.read_text())["summaries"]}
        assert found.keys() == {SUM, f"{SUM}/{name}", "recursive_doubling"}
        ratios[f"{SUM}/{name}"] = found[f"{SUM}/{name}"]["ratio"]
    files, page = [tmp_path / name / "results.jsonl" for name in names], tmp_path / "r.html"
    in_process("report", *files, "--out", page)
    assert {one["label"]: one["ratio"] for one in summarise(read(*files)) if "/" in one["label"]} == ratios
    assert f"the ratio is to that job&#39;s {SUM}" in page.read_text()
