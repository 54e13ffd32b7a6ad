"""Llamas over a sharded cache have the logits that Hugging Face gave, whatever the ranks and the way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.llama_models import MODELS, PROMPT, write_model
from treeattn.errors import ArgumentError
from treeattn.llama import Llama, Session

pytestmark = pytest.mark.mpi

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "llama" / "logits.npz")
WAYS = [("ring", "hierarchical"), ("gather", "kv_ring"), ("ring", "query_ring"), ("gather", "binary_tree")]


@pytest.fixture
def model(comm, request, tmp_path):
    """Written by rank 0, read by all."""
    path = comm.bcast(tmp_path)
    if comm.rank == 0:
        write_model(path, request.param)
    comm.Barrier()
    return Llama(path)


def assert_logits(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("model", MODELS, indirect=True)
@pytest.mark.parametrize(("prefill", "scheme"), WAYS)
def test_logits_and_tokens_are_hugging_faces(comm, model, request, prefill, scheme):
    name = request.node.callspec.params["model"]
    wanted, tokens = GOLDEN[f"{name}.logits"], GOLDEN[f"{name}.tokens"]
    layout = "zigzag" if prefill == "ring" else "contiguous"
    with Session(
        comm, model, PROMPT, capacity=len(PROMPT) + 16, scheme=scheme, prefill=prefill, layout=layout
    ) as session:
        logits = session.prefill()
        for step, token in enumerate(tokens if name == "biases" else tokens[: len(wanted)]):
            if step < len(wanted):
                assert_logits(logits, wanted[step])
            assert session.choose(logits) == token
            logits = session.step(int(token))


@pytest.mark.parametrize("model", ["grouped_llama3", "biases"], indirect=True)
@pytest.mark.parametrize("prefill", ["ring", "gather"])
def test_a_prompt_of_fewer_tokens_than_ranks(comm, model, request, prefill):
    name = request.node.callspec.params["model"]
    with Session(comm, model, PROMPT[:3], capacity=20, prefill=prefill) as session:
        assert_logits(session.prefill(), GOLDEN[f"{name}.short"])
        for token in PROMPT[3:19]:
            logits = session.step(int(token))
        session.step(5)
        with pytest.raises(ArgumentError, match="the cache is full: it was planned for 20 tokens"):
            session.step(5)
    with Session(comm, model, PROMPT[:19], capacity=20, prefill=prefill) as session:
        assert_logits(session.prefill(), logits)


@pytest.mark.parametrize("model", ["tied"], indirect=True)
@pytest.mark.parametrize(
    ("prompt", "changed", "message"),
    [
        ([], {}, "at least one token"),
        ([3, 256], {}, "the model's vocabulary ends at 255"),
        ([3], {"capacity": 5000}, "the model was made for at most 4096"),
        ([3, 4], {"capacity": 1}, "room for 1"),
        ([3], {"prefill": "none"}, "prefill 'none' is unknown"),
    ],
)
def test_what_cannot_be_continued(comm, model, prompt, changed, message):
    with pytest.raises(ArgumentError, match=message):
        Session(comm, model, np.array(prompt, np.int64), **{"capacity": 8} | changed)


@pytest.mark.parametrize("model", ["tied"], indirect=True)
def test_ranks_must_continue_the_same_prompt(comm, model):
    if comm.size == 1:
        pytest.skip("one rank cannot contradict itself")
    with pytest.raises(ArgumentError, match="the prompt"):
        Session(comm, model, [comm.rank], capacity=8)
