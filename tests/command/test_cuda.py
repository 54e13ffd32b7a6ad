"""``treeattn decode``, ``compare`` and ``generate`` with ``--device cuda``: on emulated GPUs and an NCCL made
of MPI, and what they say where there is none."""

import itertools
import re

import pytest
from safetensors.numpy import load_file, save_file

from tests.emulator.cases import Case
from tests.emulator.raw_module import compiler_problem
from tests.support.drawn import sample
from tests.support.models import PROMPT, write_model
from treeattn.backends.cuda import cupy_runtime
from treeattn.study.compare.rows import NCCL_SUM, SUM, read

from .launch import in_process, run, treeattn

CASE = Case("bfloat16", 64, group=4, batch=2, tokens=70, lengths=(70, 20))
IDS = ",".join(map(str, [*PROMPT[:15]] * 2))
SMALL = "--seq-len 70 --heads 4 --head-dim 64"


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Name -> words of a command on GPUs."""
    folder = tmp_path_factory.mktemp("cuda")
    q, k, v, lengths, _ = CASE.inputs()
    k[1, 20:], v[1, 20:] = 0, 0  # what lies beyond the lengths is still read from the file
    save_file({"q": q, "k": k, "v": v, "lengths": lengths}, folder / "cache.safetensors")
    model = write_model(folder / "model", "grouped_llama3")
    return {
        "decode": ("decode", folder / "cache.safetensors", "--device", "cuda"),
        "compare": ("compare", "--device", "cuda", *SMALL.split()),
        "generate": ("generate", "--model", model, "--prompt-ids", IDS, "--device", "cuda"),
    }


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.deep), 3])
def test_decode_takes_the_same_path_as_on_a_cpu(tmp_path, commands, ranks):
    out, facts = tmp_path / "out.safetensors", tmp_path / "facts.json"
    words = ("--layout", "zigzag", "--check", "--repeat", 2, "--out", out)
    done = treeattn(*commands["decode"], *words, "--json", facts, ranks=ranks, emulated=True)
    said = "treeattn: records travel from GPU to GPU by peer memory (transport='peer')"
    # Where it takes longer than two seconds it says how far it is.
    assert [line for line in done.stderr.splitlines() if not line.endswith(" steps")] == [said] * (ranks > 1)
    found = load_file(out)
    CASE.check(found["out"], found["lse"], tensor_cores=True)
    (row,) = done.facts["results"]
    transport = "peer" if ranks > 1 else "mpi"
    assert (row["device"], row["transport"], row["same_bits"]) == ("cuda", transport, True)
    assert row["bounds"][0] > 1e-3  # weights in 16 bits: the wider bound is the one that counts
    assert row["errors"]["oracle"][0] <= row["bounds"][0]


SERVED = "'nccl'.*'cuda-mpi'.*'host'"


@pytest.mark.parametrize(
    ("command", "words", "message"),
    sample(5, [
        ("decode", "--scheme mpi_allreduce", "is for transport='host', not None"),
        ("decode", "--transport mpi", SERVED),
        ("decode", "--transport cuda-mpi", "take transport='nccl' or 'host'"),
        ("decode", "--scheme mpi_allreduce --transport nccl", "transport='host'"),
        ("compare", "--transport nccl", "NCCL is reached through CuPy"),
        ("compare", "--transport cuda-mpi", "does not say that it takes GPU buffers"),
        ("compare", "--transport mpi", "choose from "),
        ("compare", "--schemes kv_ring", "kv_ring is for device='cpu'"),
        ("compare", "--schemes nccl_allreduce --transport host", "is for transport='nccl', not 'host'"),
        ("compare", "--device cpu --transport host", "choose from mpi"),
        ("generate", "--transport mpi", "does not serve device='cuda'"),
        ("generate", "--transport host --decode kv_ring", "kv_ring is for device='cpu'"),
        ("generate", "--transport nccl", "NCCL is reached through CuPy"),
    ]),
)  # fmt: skip
def test_what_gpus_do_not_serve_is_bad_input(commands, command, words, message):
    done = treeattn(*commands[command], *words.split(), ranks=2, code=2, emulated=True)
    assert re.search(message, done.stderr)


@pytest.mark.parametrize(("nccl", "variable", "message"), sample(1, [
    ("30", "0", "NCCL lets them only where NCCL_MULTI_RANK_GPU"),
    ("28", "1", "NCCL 2.28 needs one for each: install NCCL 2.30"),
]))  # fmt: skip
def test_ranks_that_share_a_gpu(commands, nccl, variable, message):
    words = (*commands["decode"], "--repeat", 1, "--transport")
    shared = "ranks 0, 1 share GPU 8f1c0a52-0 of .*"
    given = {"ranks": 2, "emulated": True, "EMULATED_GPUS": "1"}
    done = treeattn(*words, "host", **given)
    assert len(re.findall(shared, done.stderr)) == 1
    given |= {"EMULATED_NCCL": nccl, "NCCL_MULTI_RANK_GPU_ENABLE": variable}
    done = treeattn(*words, "nccl", **given, code=2)
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("treeattn: warning:")]
    assert re.search(f"{shared}: {message}", line)


def test_compare_has_every_transport_side_by_side(tmp_path, commands):
    out, summary = tmp_path / "r.jsonl", tmp_path / "s.json"
    schemes = ("--schemes", "ring,nccl_allreduce,mpi_allreduce")
    words = (*schemes, "--bytes", 1056, "--repetitions", 2, "--out", out)
    there = {"EMULATED_NCCL": "30", "EMULATED_CUDA_MPI": "1"}
    done = treeattn(*commands["compare"], *words, "--json", summary, ranks=2, emulated=True, **there)
    assert "GPU 8f1c0a52" not in done.stderr
    three = ("host", "nccl", "cuda-mpi")
    wanted = {("ring", "peer")} | {(scheme, over) for scheme in ("ring", SUM) for over in three}
    wanted |= {("nccl_allreduce", "nccl"), ("mpi_allreduce", "host")}
    rows = done.facts["summaries"]
    assert {(row["scheme"], row["transport"]) for row in rows} == wanted
    assert len(rows) == 2 * len(wanted)
    assert {(row["device"], row["processor"]) for row in rows} == {("cuda", "emulated GPU")}
    for word in (NCCL_SUM[:13], "on GPUs", "identical bits on all ranks (proved)"):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80

    found = read(out)
    order = [row.transport for row in found if row.what == "reduce"]
    assert sum(a != b for a, b in itertools.pairwise(order)) > len(order) / 3  # interleaved
    assert all(row.local_us is None and row.time_us > 0 for row in found)

    in_process("plot", out, "--out", tmp_path / "figures", "--format", "svg", "--figures", "time")
    assert "ring [nccl]" in (tmp_path / "figures" / "time.svg").read_text()


def test_a_transport_that_is_not_there_is_said_and_left_out(tmp_path, commands):
    words = ("--schemes", "chain", "--repetitions", 1, "--json", tmp_path / "s.json")
    given = {"ranks": 2, "emulated": True, "EMULATED_NCCL": "30", "EMULATED_GPUS": "1"}
    done = treeattn(*commands["compare"], *words, **given, NCCL_MULTI_RANK_GPU_ENABLE="0")
    assert re.search("left out transport nccl: .*ranks 0, 1 share GPU 8f1c0a52-0 of .*ENABLE=1", done.stderr)
    assert "left out transport cuda-mpi: " in done.stderr
    assert {row["transport"] for row in done.facts["summaries"]} == {"host", "peer"}
    assert "times include waiting for each other" in done.facts["warning"]
    done = treeattn(*commands["compare"], *words, **given, NCCL_MULTI_RANK_GPU_ENABLE="1")
    assert {row["transport"] for row in done.facts["summaries"]} == {"host", "nccl", "peer"}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [pytest.param(1, "--draft ngram", marks=pytest.mark.deep), (3, "--transport host --weights sharded")],
)
def test_generate_makes_the_tokens_of_the_processor(commands, tmp_path, ranks, options):
    found = {}
    for device in ("cpu", "cuda"):
        given = options if device == "cuda" else options.replace("--transport host", "")
        words = (*given.split(), "--device", device, "--json", tmp_path / f"{device}.json")
        found[device] = treeattn(
            *commands["generate"], "-n", 6, *words, ranks=ranks, emulated=device == "cuda"
        )
    done, facts, on_cpu = found["cuda"], found["cuda"].facts, found["cpu"].facts
    assert done.stdout == found["cpu"].stdout
    assert (facts["tokens"], facts["accepted"]) == (on_cpu["tokens"], on_cpu["accepted"])
    assert facts["weight_bytes"] == on_cpu["weight_bytes"]
    assert (facts["device"], facts["head_dim"], on_cpu["head_dim"]) == ("cuda", 64, 16)
    assert facts["cache_bytes"] == [4 * count for count in on_cpu["cache_bytes"]]  # heads of 16 fill up 64
    assert facts["attention_s"] == [None] * ranks
    assert "over host" in done.stderr or ranks == 1


@pytest.mark.skipif(cupy_runtime.problem() is None, reason="there is a GPU")
@pytest.mark.parametrize(
    ("command", "words"),
    [("decode", "--transport host"), ("compare", ""), ("generate", "--transport host --weights sharded")],
)
def test_without_a_gpu_one_line_says_what_to_do(commands, command, words):
    done = treeattn(*commands[command], *words.split(), ranks=2, code=2)
    (line,) = done.stderr.strip().splitlines()
    assert str(cupy_runtime.problem()) in line


DOCTOR = """
import sys
from types import SimpleNamespace
import numpy as np
from tests.command import emulated
from treeattn.backends.cuda.device import Cuda
from treeattn.cli import doctor
device = Cuda(emulated.runtime)
sys.modules["cupy"] = SimpleNamespace(
    full=lambda *given: device.from_host(np.full(*given)), asnumpy=device.to_host
)
with emulated.gpus():
    exec(doctor._TRIAL.format(transport=sys.argv[1]))
"""


@pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))
@pytest.mark.parametrize("transport", ["peer", "cuda-mpi"])
def test_the_doctors_trial_of_two_ranks_is_right(transport):
    done = run("-c", DOCTOR, transport, ranks=2, EMULATED_CUDA_MPI="1")
    assert re.findall("right|wrong", done.stdout) == ["right"] * 2  # in lines of their own, or in one
