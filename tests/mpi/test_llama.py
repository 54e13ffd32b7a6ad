"""Llamas over a sharded cache have the logits that Hugging Face gave, whatever the ranks and the way."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from safetensors.numpy import load_file, save_file

from tests.llama_models import MODELS, PROMPT, write_model
from treeattn.cache import ShardedCache
from treeattn.errors import ArgumentError, RestrictionError, ScheduleError, TreeattnError
from treeattn.files import open_cache
from treeattn.llama import Llama, Sampling, Session
from treeattn.llama import model as model_module
from treeattn.llama import prefill as prefill_module
from treeattn.llama import session as session_module
from treeattn.llama.drafts import ModelDrafts, NgramDrafts, draft_tree
from treeattn.llama.generate import Drafting, generate

pytestmark = pytest.mark.mpi

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "llama" / "logits.npz")
WAYS = [
    ("replicated", "ring", None),
    ("replicated", "gather", "kv_ring"),
    ("replicated", "ring", "query_ring"),
    ("replicated", "gather", "binary_tree"),
    ("sharded", "ring", None),
    ("sharded", "gather", "kv_ring"),
]


@pytest.fixture(params=["replicated", "sharded"])
def weights(request):
    return request.param


@pytest.fixture
def directory(comm, request, tmp_path):
    """Written by rank 0, read by all."""
    path = comm.bcast(tmp_path)
    if comm.rank == 0:
        write_model(path, request.param)
    comm.Barrier()
    return path


@pytest.fixture
def model(comm, directory, weights):
    return Llama(directory, comm if weights == "sharded" else None)


def assert_logits(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("directory", MODELS, indirect=True)
@pytest.mark.parametrize(("weights", "prefill", "scheme"), WAYS)
def test_logits_and_tokens_are_hugging_faces(comm, model, request, prefill, scheme):
    name = request.node.callspec.params["directory"]
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


@pytest.mark.parametrize("directory", ["grouped_llama3", "biases"], indirect=True)
@pytest.mark.parametrize("prefill", ["ring", "gather"])
def test_a_prompt_of_fewer_tokens_than_ranks(comm, model, request, prefill):
    name = request.node.callspec.params["directory"]
    with Session(comm, model, PROMPT[:3], capacity=20, prefill=prefill) as session:
        assert_logits(session.prefill(), GOLDEN[f"{name}.short"])
        for token in PROMPT[3:19]:
            logits = session.step(int(token))
        session.step(5)
        with pytest.raises(ArgumentError, match="the cache is full: it was planned for 20 tokens"):
            session.step(5)
    with Session(comm, model, PROMPT[:19], capacity=20, prefill=prefill) as session:
        assert_logits(session.prefill(), logits)


def peak_of_a_prefill(comm, model, tokens):
    """Bytes that this rank allocates beside its cache."""
    tracemalloc.start()
    with Session(comm, model, np.arange(tokens) % 256, capacity=tokens) as session:
        session.prefill()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak - session.cache_bytes


@pytest.mark.parametrize("directory", ["grouped_llama3"], indirect=True)
def test_a_prefill_holds_what_a_layer_hands_on_and_no_more(comm, model, monkeypatch):
    """No second q, k and v, nor anything of the width of an MLP; and what `inspect` says is what it takes."""
    monkeypatch.setattr(model_module, "_BLOCK", 32)
    bytes_of_a_token = 4 * prefill_module.ring_floats(model.config, model.config.head_dim, comm.size)
    _, small, large = (peak_of_a_prefill(comm, model, tokens * comm.size) for tokens in (64, 256, 512))
    tables = 256  # positions, their sines and cosines, intervals
    assert 256 * bytes_of_a_token <= large - small <= 256 * (bytes_of_a_token + tables)


@pytest.mark.parametrize("directory", ["grouped_llama3"], indirect=True)
@pytest.mark.parametrize("prefill", ["ring", "gather"])
def test_a_callers_messages_stay_the_callers(comm, model, monkeypatch, prefill):
    """And a prefill gives its communicator back."""
    kept = []

    def recorded(*arguments):
        kept.append(duplicate(*arguments))
        return kept[-1]

    duplicate = prefill_module.duplicate
    monkeypatch.setattr(prefill_module, "duplicate", recorded)
    mine, theirs = np.full(4, comm.rank, np.float32), np.empty(4, np.float32)
    sent = comm.Isend(mine, (comm.rank + 1) % comm.size)
    with Session(comm, model, PROMPT, capacity=len(PROMPT), prefill=prefill) as session:
        assert_logits(session.prefill(), GOLDEN["grouped_llama3.logits"][0])
    comm.Recv(theirs, (comm.rank - 1) % comm.size)
    sent.Wait()
    assert set(theirs) == {(comm.rank - 1) % comm.size}
    assert kept == [MPI.COMM_NULL]


DRAWN = Sampling(temperature=1.5, top_k=50, top_p=0.95, seed=3)


@pytest.mark.parametrize("directory", ["biases"], indirect=True)
@pytest.mark.parametrize("drafter", [None, "ngram", "oracle"])
def test_drawn_tokens_are_the_same_on_any_number_of_ranks_and_with_drafts(comm, model, directory, drafter):
    with Session(MPI.COMM_SELF, Llama(directory), PROMPT, capacity=400, sampling=DRAWN) as session:
        wanted = generate(MPI.COMM_SELF, session, PROMPT.tolist(), 40).tokens
    assert len(set(wanted)) > 20
    makers = {"ngram": NgramDrafts, "oracle": lambda: Oracle(wanted, 3)}
    drafting = None
    if drafter:
        drafting = Drafting(8, makers[drafter]() if comm.rank == 0 else None)
    options = {"capacity": 400, "drafts": 8 if drafter else 0, "sampling": DRAWN}
    with Session(comm, model, PROMPT, **options) as session:
        made = generate(comm, session, PROMPT.tolist(), 40, drafting=drafting)
    assert comm.allgather(made.tokens) == [wanted] * comm.size
    if drafter == "oracle":
        assert made.accepted[:3] == [3, 3, 3]


@pytest.mark.parametrize("directory", ["tied"], indirect=True)
def test_a_model_that_is_sharded_over_other_ranks(comm, directory):
    if comm.size == 1:
        pytest.skip("one rank has no other ranks")
    model = Llama(directory, comm)
    with pytest.raises(ArgumentError, match="sharded over other ranks than the session's"):
        Session(MPI.COMM_SELF, model, [3], capacity=8)
    twin = comm.Dup()
    with Session(twin, model, PROMPT[:9], capacity=9) as session:
        logits = session.prefill()
    twin.Free()
    with Session(comm, Llama(directory), PROMPT[:9], capacity=9) as session:
        assert_logits(logits, session.prefill())


class Oracle:
    """Drafts that are right for so many tokens, then wrong, beside a path that is wrong at once."""

    def __init__(self, tokens, right):
        self.tokens, self.right = tokens, right

    def __call__(self, tokens, budget, depth):
        known = self.tokens[len(tokens) - len(PROMPT) :][:depth]
        known = known[: self.right] + [token ^ 1 for token in known[self.right :]]
        return [known[: budget - 2], [known[0] ^ 3, 5]] if len(known) > 1 else []


@pytest.mark.parametrize("directory", ["biases"], indirect=True)
@pytest.mark.parametrize("drafter", ["ngram", "model", "oracle", "wrong"])
def test_drafts_change_no_token_and_no_logit(comm, model, directory, request, drafter):
    name = request.node.callspec.params["directory"]
    wanted = GOLDEN[f"{name}.tokens"].tolist()
    capacity = len(PROMPT) + len(wanted)
    makers = {
        "ngram": NgramDrafts,
        "model": lambda: ModelDrafts(directory, 256, capacity),
        "oracle": lambda: Oracle(wanted, 3),
        "wrong": lambda: Oracle(wanted, 0),
    }
    drafting = Drafting(8, makers[drafter]() if comm.rank == 0 else None)
    with Session(comm, model, PROMPT, capacity=capacity, drafts=8) as session:
        made = generate(comm, session, PROMPT.tolist(), len(wanted), drafting=drafting)
        assert made.tokens == wanted
        assert 1 + sum(made.accepted) + len(made.accepted) == len(wanted)
        assert session.tokens == capacity - 1
        last = session.step(wanted[-1])
        if drafter == "model":  # which says what it says itself
            assert len(made.step_s) == 2
        if drafter == "oracle":
            assert made.accepted[:2] == [3, 3]
        if drafter == "wrong":
            assert set(made.accepted) == {0}
    text = np.concatenate([PROMPT, wanted])
    with Session(comm, model, text, capacity=capacity) as session:
        assert_logits(last, session.prefill())


@pytest.mark.parametrize("directory", ["tied"], indirect=True)
def test_trees_that_were_not_planned(comm, model, monkeypatch):
    tree = draft_tree(3, [[4, 5]], 4)
    with (
        Session(comm, model, [3], capacity=8, drafts=5) as session,
        pytest.raises(ArgumentError, match="the session was planned without trees, or for others"),
    ):
        session.verify(tree)
    monkeypatch.setattr(session_module, "Decoder", None)  # which would keep its communicator
    with pytest.raises(RestrictionError, match="attends while it communicates"):
        Session(comm, model, [3], capacity=8, drafts=5, scheme="kv_ring")


@pytest.mark.parametrize("directory", ["biases", "tied"], indirect=True)
def test_no_rank_reads_anothers_part(comm, directory, monkeypatch, tmp_path):
    """Every rank has a copy of the model in which all that it does not read is NaN."""
    read = []

    def recorded(file, buffers, at):
        read.append((os.readlink(f"/proc/self/fd/{file}"), at, sum(map(len, buffers))))
        return preadv(file, buffers, at)

    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", recorded)
    Llama(directory, comm)
    monkeypatch.undo()
    poisoned(directory, tmp_path / "own", read)
    with Session(comm, Llama(tmp_path / "own", comm), PROMPT[:40], capacity=48) as session:
        logits = session.prefill()
        for token in PROMPT[40:47]:
            logits = session.step(int(token))
    with Session(comm, Llama(directory), PROMPT[:47], capacity=48) as session:
        assert_logits(logits, session.prefill())
    parts = comm.allgather(sorted(set(read)))
    everything = sorted(piece for part in parts for piece in part)
    for (file, at, length), (other, after, _) in itertools.pairwise(everything):
        assert file != other or at + length <= after
    matrices = [
        t for file in directory.glob("*.safetensors") for t in load_file(file).values() if t.ndim == 2
    ]
    assert sum(length for _, _, length in everything) == sum(matrix.nbytes for matrix in matrices)


def poisoned(directory, copy, read):
    """A copy whose matrices are NaN but for what was read."""
    shutil.copytree(directory, copy)
    for path in copy.glob("*.safetensors"):
        original, data = (directory / path.name).read_bytes(), bytearray(path.read_bytes())
        for name, tensor in (held := open_cache(path)).tensors.items():
            if tensor.ndim == 2:
                begin = held.starts[name]
                data[begin : begin + tensor.nbytes] = np.full(tensor.size, np.nan, np.float32).tobytes()
        for file, at, length in read:
            if Path(file).name == path.name:
                data[at : at + length] = original[at : at + length]
        path.write_bytes(data)


@pytest.mark.parametrize("directory", ["tied"], indirect=True)
@pytest.mark.parametrize(
    ("prompt", "changed", "message"),
    [
        ([], {}, "at least one token"),
        ([3, 256], {}, "the prompt has token 256, the model's vocabulary ends at 255"),
        ([-3, 1], {}, "the prompt has token -3, the model's vocabulary ends at 255"),
        ([3], {"capacity": 5000}, "the model was made for at most 4096"),
        ([3, 4], {"capacity": 1}, "room for 1"),
        ([3], {"prefill": "none"}, "prefill 'none' is unknown"),
    ],
)
def test_what_cannot_be_continued(comm, model, prompt, changed, message):
    with pytest.raises(ArgumentError, match=message):
        Session(comm, model, np.array(prompt, np.int64), **{"capacity": 8} | changed)


@pytest.mark.parametrize("directory", ["tied"], indirect=True)
def test_ranks_must_continue_the_same_prompt(comm, model):
    if comm.size == 1:
        pytest.skip("one rank cannot contradict itself")
    with pytest.raises(ArgumentError, match="the prompt"):
        Session(comm, model, [comm.rank], capacity=8)


@pytest.mark.parametrize("directory", ["tied"], indirect=True)
@pytest.mark.parametrize("weights", ["replicated"])
def test_ranks_must_have_the_same_model_and_prefill(comm, model):
    """As where nodes have copies of a directory: other tokens that end a text would leave ranks waiting."""
    if comm.size == 1:
        pytest.skip("one rank cannot contradict itself")
    with pytest.raises(ArgumentError, match="prefill differs between ranks"):
        Session(comm, model, [3], capacity=8, prefill="gather" if comm.rank else "ring")
    with pytest.raises(ArgumentError, match="sampling differs between ranks"):
        Session(comm, model, [3], capacity=8, sampling=Sampling(1.0, seed=comm.rank))
    model.config = dataclasses.replace(model.config, eos=(comm.rank,))
    with pytest.raises(
        ArgumentError, match=r"the model's eos differs between ranks: \(0,\) on rank 0, \(1,\)"
    ):
        Session(comm, model, [3], capacity=8)


@pytest.mark.parametrize("directory", ["tied"], indirect=True)
def test_ranks_must_have_the_same_weights(comm, directory, weights, tmp_path):
    """As where nodes have copies of a directory: norms, which every rank has whole, tell them apart."""
    if comm.size == 1:
        pytest.skip("one rank cannot contradict itself")
    own = shutil.copytree(directory, tmp_path / f"copy-{comm.rank}")
    for file in own.glob("*.safetensors"):
        changed = {name: t * (comm.rank + 1) if "norm" in name else t for name, t in load_file(file).items()}
        save_file(changed, file)
    model = Llama(own, comm if weights == "sharded" else None)
    with pytest.raises(ArgumentError, match="digest of the model's norms differs between ranks"):
        Session(comm, model, [3], capacity=8)


def full(*arguments):
    raise MemoryError("none left")


@pytest.mark.parametrize("directory", ["tied"], indirect=True)
def test_what_one_rank_fails_at_alone_all_ranks_tell(comm, model, monkeypatch):
    """While a session and its prefill are planned: nobody waits, and no communicator stays behind."""
    last, kept = comm.rank == comm.size - 1, []
    with pytest.raises(ScheduleError, match="there is no scheme 'nonsense'"):
        Session(comm, model, [3], capacity=8, scheme="nonsense" if last else None)
    with monkeypatch.context() as patch:
        if last:
            patch.setattr(ShardedCache, "another", full)
        with pytest.raises(TreeattnError, match="MemoryError: none left"):
            Session(comm, model, [3], capacity=8)
    with Session(comm, model, PROMPT, capacity=len(PROMPT)) as session:
        with monkeypatch.context() as patch:
            patch.setattr(prefill_module, "duplicate", kept.append)
            if last:
                patch.setattr(prefill_module.Ring, "_plan", full)
            with pytest.raises(TreeattnError, match="MemoryError: none left"):
                session.prefill()
        assert kept == []
        session.prefill()


@pytest.mark.parametrize("directory", ["tied"], indirect=True)
def test_a_session_whose_prefill_raised_goes_on_with_no_wrong_token(comm, model):
    def told(layer):
        if layer == 1:
            raise ValueError("stop")

    with Session(comm, model, PROMPT, capacity=320) as session:
        with pytest.raises(ValueError, match="stop"):
            session.prefill(told)
        with pytest.raises(
            ArgumentError, match="the first layer has 301 tokens in its cache, the last one 0: "
        ):
            session.step(5)
        session.rollback(0)
        with pytest.raises(ArgumentError, match="the prompt was taken back: make a new session"):
            session.prefill()


@pytest.mark.parametrize("directory", ["tied"], indirect=True)
def test_what_is_no_token_of_the_model(comm, model):
    """NumPy would take the last token for -1, a sharded vocabulary none at all."""
    with Session(comm, model, PROMPT, capacity=320, drafts=3) as session:
        logits = session.prefill()
        for token, message in (
            (-1, "token -1"),
            (256, "token 256"),
            (1.5, "float64: token numbers are whole"),
        ):
            with pytest.raises(ArgumentError, match=f"the step has {message}"):
                session.step(token)
        with pytest.raises(ArgumentError, match="the tree has token 300, the model's vocabulary ends at 255"):
            session.verify(draft_tree(3, [[300]], 3))
        assert session.tokens == len(PROMPT)
        session.step(session.choose(logits))


@pytest.mark.parametrize("directory", ["tied"], indirect=True)
def test_drafts_that_fail_on_rank_0_fail_on_all(comm, model):
    def broken(tokens, budget, depth):
        raise ValueError("no idea")

    drafting = Drafting(5, broken if comm.rank == 0 else None)
    with (
        Session(comm, model, [3], capacity=8, drafts=5) as session,
        pytest.raises(ArgumentError, match="ValueError: no idea"),
    ):
        generate(comm, session, [3], 7, drafting=drafting)
