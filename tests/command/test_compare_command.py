"""`treeattn compare` as people use it: resumed after a kill, with a broken file, with more repetitions."""

import os
import shutil
import sys
import time

import pandas
import pytest

from treeattn.study.compare.rows import SUM, Row, read
from treeattn.study.compare.summary import summarise

from .launch import ROOT, in_process, run, started, treeattn

SMALL = ("--head-dim", 16, "--repetitions", 7)
REDUCE = ("compare", "--bytes", 288, "--schemes", "ring,binary_tree", *SMALL)


def test_table_file_and_json(tmp_path):
    out = tmp_path / "r.jsonl"
    done = treeattn(
        "compare", "--schemes", "ring,mpi_allreduce,head_scatter,kv_ring,k_nomial_tree:radix=3",
        "--seq-len", "1Ki", "--bytes", 288, "--batch", 2, *SMALL, "--out", out,
        "--json", tmp_path / "s.json", ranks=3,
    )  # fmt: skip
    schemes = {"ring", "mpi_allreduce", "head_scatter", "k_nomial_tree:radix=3", SUM}
    assert len(done.facts["summaries"]) == 2 * len(schemes) + 1  # a ring of keys has no reduction
    for word in ("95 % interval", "ratio", "verdict", "k_nomial_tree:radix=3", "1,024 tokens", "288 bytes"):
        assert word in done.stdout
    assert "identical bits on all ranks (proved): " in done.said
    assert f"ratio: to {SUM} within each repetition" in done.said
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert ("share" in done.stdout) == (len(os.sched_getaffinity(0)) < 3)
    frame = pandas.read_json(out, lines=True)
    assert len(frame) == 7 * 11
    assert set(frame["scheme"]) == schemes | {"kv_ring"}
    assert list(frame.columns) == list(Row.__struct_fields__)
    reductions = frame[frame["what"] == "reduce"]
    assert (reductions["algbw"] * reductions["time_us"] * 1e3).tolist() == pytest.approx(
        reductions["bytes"].tolist()
    )
    assert set(reductions["bytes"]) == {288}
    assert not any(row.wrong for row in read(out))


def test_nothing_is_measured_twice_and_more_repetitions_are_of_another_run(tmp_path):
    out = tmp_path / "r.jsonl"
    in_process(*REDUCE, "--out", out)
    content = out.read_bytes()
    again = in_process(*REDUCE, "--out", out)
    assert "21 are in the file already" in again.stderr
    assert out.read_bytes() == content
    assert "binary_tree" in again.stdout
    assert "of one run" in again.stdout
    more = in_process(*REDUCE[:-1], 12, "--out", out)
    assert "36 blocks; 21 are in the file already" in more.stderr
    assert {(one["runs"], one["blocks"]) for one in summarise(read(out))} == {(2, 12)}


def test_a_killed_run_goes_on_where_it_ended(tmp_path):
    out = tmp_path / "r.jsonl"
    words = (*REDUCE[:-1], 10_000, "--out", out)
    with started("-m", "treeattn", *words, ranks=2) as process:
        while not (out.exists() and out.read_bytes().count(b"\n") >= 5):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
    time.sleep(2)  # until the launcher's helpers have ended the rank that writes
    kept = len(read(out))
    assert kept >= 5
    with out.open("ab") as file:
        file.write(b'{"what":"reduce","run":"cut off in mid li')
    done = treeattn(*REDUCE, "--out", out, ranks=2)
    assert "are in the file already" in done.stderr
    found = read(out)
    blocks = [(row.key, row.repetition) for row in found]
    assert len(blocks) == len(set(blocks)) == len(pandas.read_json(out, lines=True)) >= 18
    assert len({row.run for row in found}) == 2


FULL_DISK = """
import resource
from mpi4py import MPI
from treeattn.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (7000, 7000))
main()
"""


def test_a_run_after_a_full_disk_goes_on(tmp_path):
    """Files that may not grow beyond so many bytes: the last line is written in part, and the job ends."""
    out = tmp_path / "r.jsonl"
    full = run("-c", FULL_DISK, *REDUCE, "--out", out, ranks=2, code=1)
    assert "r.jsonl: cannot be written (File too large); what it holds is kept" in full.stderr
    assert out.stat().st_size == 7000
    treeattn(*REDUCE, "--out", out, ranks=2)
    assert len(read(out)) == len(pandas.read_json(out, lines=True)) == 21


def test_jobs_of_several_sizes_are_one_study(tmp_path):
    """Ranks are part of a point's key: a scaling study has nothing to keep apart."""
    out = tmp_path / "r.jsonl"
    words = ("compare", "--bytes", 288, "--schemes", "ring", *SMALL, "--out", out)
    for ranks in (1, 2):
        treeattn(*words, ranks=ranks)
    assert {(one["ranks"], one["blocks"]) for one in summarise(read(out))} == {(1, 7), (2, 7)}
    done = in_process("plot", out, "--figures", "scaling", "--format", "svg", "--out", tmp_path)
    assert done.stdout == f"{tmp_path}/scaling.svg\n"


def test_another_version_in_the_file_is_kept_apart_and_named(tmp_path):
    out = tmp_path / "r.jsonl"
    shutil.copy(ROOT / "tests/data/compare.jsonl", out)
    before = summarise(read(out))
    done = in_process(*REDUCE, "--out", out)
    assert "90 rows of the file are of another version or algorithm, and are" in done.said
    assert summarise(read(out))[: len(before)] == before


def test_a_scheme_that_cannot_run_is_named_and_the_others_go_on(tmp_path):
    out = tmp_path / "r.jsonl"
    words = ("compare", "--bytes", 288, "--schemes", "ring,hierarchical:nodes=5+5", *SMALL)
    done = in_process(*words, "--out", out, code=1)
    assert "could not run: hierarchical" in done.stdout
    found = read(out)
    assert {row.scheme for row in found if row.error is None} == {"ring", SUM}
    (failed,) = [row for row in found if row.error is not None]
    assert "10 ranks" in failed.error


def test_inputs_without_room_are_named_once_and_the_others_go_on(tmp_path):
    out = tmp_path / "r.jsonl"
    words = ("compare", "--schemes", "ring,chain", "--seq-len", "64,1000000M", *SMALL)
    done = in_process(*words, "--out", out, code=1)
    assert done.stdout.count("could not run: ") == 1
    assert "GB free: choose shorter --seq-len" in done.said
    assert "Traceback" not in done.stderr
    assert {(row.tokens, row.error is None) for row in read(out)} == {(64, True), (10**12, False)}


def test_without_scipy_rows_are_written_and_medians_printed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    out = tmp_path / "r.jsonl"
    done = in_process(*REDUCE, "--out", out)
    assert "note: medians only: scipy is missing" in done.said
    assert "pip install '.[study]'" in done.said
    assert "faster" not in done.said
    assert len(read(out)) == 21


def test_a_cluster_without_room_for_the_job():
    done = treeattn("compare", "--schemes", "chain", "--cluster", "dual-4090", ranks=3, code=2)
    assert done.stderr.count("has 2 places") == 1
