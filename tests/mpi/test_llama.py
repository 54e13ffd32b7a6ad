"""Llamas over a sharded cache have the logits that Hugging Face gave, whatever the ranks and the way, and on
emulated GPUs."""

import importlib
import itertools
import shutil
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI
from msgspec import structs
from safetensors.numpy import load_file, save_file

from tests.emulator.runtime import StrictRuntime
from tests.support.models import GOLDEN, MODELS, PROMPT, assert_logits, write_model
from treeattn import Reduction
from treeattn.attention.shape import DTYPES
from treeattn.cache import ShardedCache
from treeattn.collectives.runtime.mpi_communicator import MpiCommunicator
from treeattn.errors import ArgumentError, BackendError, RestrictionError, ScheduleError, TreeattnError
from treeattn.llama import Llama, Session
from treeattn.llama.drafts import NgramDrafts, draft_tree
from treeattn.llama.generate import generate
from treeattn.llama.weights import Weights, shapes

prefill_module = importlib.import_module("treeattn.decoder.prefill")  # beside it is the function of that name
RUNTIME = StrictRuntime
WAYS = [
    ("replicated", "zigzag", None),
    ("sharded", "contiguous", "kv_ring"),
    ("replicated", "contiguous", "binary_tree"),
    ("sharded", "zigzag", None),
    ("replicated", "zigzag", "query_ring"),
    ("replicated", "contiguous", "kv_ring"),
]
#: Every model one way, in turn, and one of them in all ways.
CASES = [*zip(MODELS, itertools.cycle(WAYS)), *(("biases", way) for way in WAYS)]


@pytest.fixture
def tied(written):
    """The directory of a small model."""
    return written("tied")


@pytest.fixture(params=["replicated", "sharded"])
def weights(request):
    return request.param


def load(comm, directory, weights):
    return Llama(directory, comm if weights == "sharded" else None)


def check_logits(comm, model, name, steps, **given):
    """Hugging Face's, as far as they are kept, and its tokens."""
    wanted, tokens = GOLDEN[f"{name}.logits"], GOLDEN[f"{name}.tokens"][:steps]
    with Session(comm, model, PROMPT, capacity=len(PROMPT) + len(tokens), **given) as session:
        logits = session.prefill()
        for step, token in enumerate(tokens):
            if step < len(wanted):
                assert_logits(logits, wanted[step])
            assert session.choose(logits) == token
            logits = session.step(int(token))


@pytest.mark.parametrize(("name", "way"), CASES)
def test_logits_and_tokens_are_hugging_faces(comm, written, name, way):
    weights, layout, scheme = way
    steps = None if name == "biases" else len(GOLDEN[f"{name}.logits"])
    check_logits(comm, load(comm, written(name), weights), name, steps, scheme=scheme, layout=layout)


@pytest.mark.parametrize(
    ("dtype", "weights"), [("bfloat16", "sharded"), ("bfloat16", "replicated"), ("float16", "sharded")]
)
def test_weights_of_16_bits(comm, tmp_path, dtype, weights):
    """Caches of their type cost no more than rounding keys, values and queries does; and drafts change no
    token."""
    path, elements = comm.bcast(tmp_path), DTYPES[dtype]
    if comm.rank == 0:
        directory = write_model(path / "narrow", "biases", elements)
        shutil.copytree(directory, path / "wide")
        for file in (path / "wide").glob("*.safetensors"):
            save_file({name: one.astype(np.float32) for name, one in load_file(file).items()}, file)
    comm.Barrier()
    tokens = GOLDEN["biases.tokens"].tolist()[:8]
    with Session(MPI.COMM_SELF, Llama(path / "wide"), PROMPT, capacity=400) as session:
        wanted = [session.prefill(), *map(session.step, tokens)]
    model = load(comm, path / "narrow", weights)
    assert model.dtype == dtype
    assert model.weight_bytes < 0.6 * 4 * sum(np.prod(s) for s in shapes(model.config).values())
    with Session(comm, model, PROMPT, capacity=400) as session:
        assert session.decoder.shape.dtype == dtype
        made = np.array([session.prefill(), *map(session.step, tokens)])
    off = np.abs(made - wanted).max() / np.abs(wanted).max()
    assert 1e-4 < off < {"bfloat16": 0.03, "float16": 4e-3}[dtype]  # it is rounded
    with Session(comm, model, PROMPT, capacity=400) as session:
        greedy = generate(session, 12).tokens
    drafter = Oracle(greedy, 3) if comm.rank == 0 else None
    with Session(comm, model, PROMPT, capacity=400, drafts=8) as session:
        assert generate(session, 12, drafter=drafter).tokens == greedy


def test_a_prompt_of_fewer_tokens_than_ranks(comm, written, weights):
    model = load(comm, written("biases"), weights)
    with Session(comm, model, PROMPT[:3], capacity=20) as session:
        assert_logits(session.prefill(), GOLDEN["biases.short"])
        for token in PROMPT[3:19]:
            logits = session.step(int(token))
        session.step(5)
        with pytest.raises(ArgumentError, match="the cache is full: it was planned for 20 tokens"):
            session.step(5)
    with Session(comm, model, PROMPT[:19], capacity=20) as session:
        assert_logits(session.prefill(), logits)


def test_a_callers_messages_stay_the_callers(comm, written, duplicates):
    mine, theirs = np.full(4, comm.rank, np.float32), np.empty(4, np.float32)
    sent = comm.Isend(mine, (comm.rank + 1) % comm.size)
    model = Llama(written("grouped_llama3"))
    with Session(comm, model, PROMPT, capacity=len(PROMPT)) as session:
        assert_logits(session.prefill(), GOLDEN["grouped_llama3.logits"][0])
    comm.Recv(theirs, (comm.rank - 1) % comm.size)
    sent.Wait()
    assert set(theirs) == {(comm.rank - 1) % comm.size}
    assert bool(duplicates) == (comm.size > 1)
    assert duplicates == [MPI.COMM_NULL] * len(duplicates)


class Oracle:
    """Drafts that are right for so many tokens, then wrong, beside a path that is wrong at once."""

    def __init__(self, tokens, right):
        self.tokens, self.right = tokens, right

    def __call__(self, tokens, budget, depth):
        known = self.tokens[len(tokens) - len(PROMPT) :][:depth]
        known = known[: self.right] + [token ^ 1 for token in known[self.right :]]
        return [known[: budget - 2], [known[0] ^ 3, 5]] if len(known) > 1 else []


@pytest.mark.parametrize(
    ("weights", "drafter"), [("sharded", "ngram"), ("sharded", "oracle"), ("replicated", "wrong")]
)
def test_drafts_change_no_token_and_no_logit(comm, written, weights, drafter):
    directory, wanted = written("biases"), GOLDEN["biases.tokens"].tolist()
    model, capacity = load(comm, directory, weights), len(PROMPT) + len(wanted)
    makers = {"ngram": NgramDrafts, "oracle": lambda: Oracle(wanted, 3), "wrong": lambda: Oracle(wanted, 0)}
    asked = makers[drafter]() if comm.rank == 0 else None
    with Session(comm, model, PROMPT, capacity=capacity, drafts=8) as session:
        made = generate(session, len(wanted), drafter=asked)
        assert made.tokens == wanted
        assert 1 + sum(made.accepted) + len(made.accepted) == len(wanted)
        assert session.tokens == capacity - 1
        last = session.step(wanted[-1])
        if drafter == "oracle":
            assert made.accepted[:2] == [3, 3]
        if drafter == "wrong":
            assert set(made.accepted) == {0}
    with Session(comm, model, np.concatenate([PROMPT, wanted]), capacity=capacity) as session:
        assert_logits(last, session.prefill())


@pytest.mark.parametrize("name", ["biases", "tied"])
def test_matrices_are_read_once_by_all_ranks_together(comm, written, name, monkeypatch):
    directory, read, whole = written(name), [], Weights.read

    def recorded(weights, *given):
        read.append(whole(weights, *given))
        return read[-1]

    monkeypatch.setattr(Weights, "read", recorded)
    Llama(directory, comm)
    assert not any(isinstance(one, np.memmap) for one in read)
    tensors = [t for file in directory.glob("*.safetensors") for t in load_file(file).values()]
    held = comm.allgather(sum(part.nbytes for part in read if part.ndim == 2))
    assert sum(held) == sum(t.nbytes for t in tensors if t.ndim == 2)
    assert max(held) - min(held) < sum(held) / 2


def test_ranks_must_agree(comm, several, tied, tmp_path):
    """Also where nodes have copies of a directory: what every rank has whole tells them apart."""
    model, own = Llama(tied), shutil.copytree(tied, tmp_path / "copy")
    for file in own.glob("*.safetensors"):
        changed = {name: t * (comm.rank + 1) if "norm" in name else t for name, t in load_file(file).items()}
        save_file(changed, file)
    ended = Llama(tied)
    ended.config = structs.replace(model.config, eos=(comm.rank,))
    for changes, message in (
        ({"prompt": [comm.rank]}, "the prompt differs"),
        ({"layout": "interleaved" if comm.rank else "zigzag"}, "layout differs between ranks"),
        ({"model": ended}, r"the model's eos differs between ranks: \(0,\) on rank 0, \(1,\)"),
        ({"model": Llama(own)}, "digest of the model's norms differs between ranks"),
        ({"model": Llama(own, comm)}, "digest of the model's norms differs between ranks"),
        ({"scheme": None if comm.rank else "nonsense"}, "rank 0: there is no scheme 'nonsense'"),
    ):
        with pytest.raises((ArgumentError, ScheduleError), match=message):
            Session(comm, **{"model": model, "prompt": [3], "capacity": 8} | changes)


def test_what_is_no_token_of_the_model(comm, tied, weights):
    """NumPy would take the last token for -1, a sharded vocabulary none at all."""
    with Session(comm, load(comm, tied, weights), PROMPT, capacity=320, drafts=3) as session:
        logits = session.prefill()
        for token, said in ((-1, "token -1"), (256, "token 256"), (1.5, "float64: token numbers are whole")):
            with pytest.raises(ArgumentError, match=f"the step has {said}"):
                session.step(token)
        with pytest.raises(ArgumentError, match="the tree has token 300, the model's vocabulary ends at 255"):
            session.verify(draft_tree(3, [[300]], 3))
        assert session.tokens == len(PROMPT)
        session.step(session.choose(logits))


def test_what_one_rank_fails_at_alone_all_ranks_tell(comm, tied, weights, monkeypatch):
    """While a session and its prefill are planned: no rank waits, and no communicator stays behind."""
    model, last, kept = load(comm, tied, weights), comm.rank == comm.size - 1, []
    full = mock.Mock(side_effect=MemoryError("none left"))
    with monkeypatch.context() as patch:
        if last:
            patch.setattr(ShardedCache, "_make_arrays", full)
        with pytest.raises(TreeattnError, match="MemoryError: none left"):
            Session(comm, model, [3], capacity=8)
    with Session(comm, model, PROMPT, capacity=len(PROMPT)) as session:
        with monkeypatch.context() as patch:
            patch.setattr(MpiCommunicator, "dup", lambda self: kept.append(self))
            if last:
                patch.setattr(prefill_module._Ring, "__init__", full)
            with pytest.raises(TreeattnError, match="MemoryError: none left"):
                session.prefill()
        assert kept == []
        session.prefill()


def test_what_fails_on_rank_0_alone_fails_on_all(comm, tied):
    broken = mock.Mock(side_effect=ValueError("no idea"))
    model, tree = Llama(tied), draft_tree(3, [[4, 5]], 5)
    logits = np.full((5, 256), 0 if comm.rank else np.nan, np.float32)
    with Session(comm, model, [3], capacity=8, drafts=5) as session:
        with pytest.raises(ArgumentError, match="logits are NaN"):
            session.choose(logits[0])
        with pytest.raises(ArgumentError, match="logits are NaN"):
            session.accept(tree, logits)
        with pytest.raises(ArgumentError, match="ValueError: no idea"):
            generate(session, 7, drafter=None if comm.rank else broken)


@pytest.mark.many_ranks
def test_drafts_layouts_and_ranks_change_no_bit_of_a_logit(comm, written):
    """All of it has the hash of one rank alone."""
    directory, digests, texts = written("tied"), set(), set()
    model = Llama(directory, reproducible=True)
    ways = [
        (MPI.COMM_SELF, {}, False),
        (comm, {}, False),
        (comm, {"scheme": "chain", "layout": "contiguous"}, True),
        (comm, {"scheme": "binary_tree", "layout": "interleaved"}, True),
    ]
    for where, settings, drafted in ways:
        drafts = 5 if drafted else 0
        with Session(where, model, PROMPT, capacity=len(PROMPT) + 40, drafts=drafts, **settings) as session:
            made = generate(session, 40, drafter=NgramDrafts() if drafted else None)
        assert len(made.digests) == 40
        digests.add(tuple(made.digests))
        texts.add(tuple(made.tokens))
        assert not drafted or sum(made.accepted) > 0
    assert len(digests) == len(texts) == 1


def test_sharded_weights_are_not_reproducible(comm, tied):
    with pytest.raises(RestrictionError, match="weights that every rank has whole"):
        Llama(tied, comm, reproducible=True)


# On emulated GPUs, which take their time: that other models' numbers matter is shown on the CPU.


def on_gpus(test):
    """Three ranks with one each."""
    three = pytest.mark.skipif(MPI.COMM_WORLD.size != 3, reason="models on emulated GPUs run on three ranks")
    return three(pytest.mark.usefixtures("runtime")(test))


@on_gpus
@pytest.mark.slow
def test_a_gpu_has_logits_and_tokens_of_hugging_face(comm, written):
    model = Llama(written("biases"), comm, device="cuda")
    check_logits(comm, model, "biases", 3, scheme=Reduction("head_scatter", "host"))


@on_gpus
@pytest.mark.parametrize("scheme", ["recursive_doubling", "nccl_allreduce"])
def test_records_travel_over_nccl(comm, tied, nccl_communicators, scheme):
    given = {"capacity": 14, "scheme": Reduction(scheme, "nccl")}
    with Session(comm, Llama(tied, device="cuda"), PROMPT[:10], **given) as session:
        token = session.choose(session.prefill())
        logits = [session.step(token) for _ in range(3)]
    with Session(comm, Llama(tied), PROMPT[:10], capacity=14) as session:
        assert session.choose(session.prefill()) == token
        for row in logits:
            assert_logits(row, session.step(token))
    assert nccl_communicators


@on_gpus
def test_ranks_have_one_kind_of_device(comm, tied):
    with pytest.raises(ArgumentError, match="the model's device differs between ranks: 'cpu' on rank 0"):
        Llama(tied, comm, device="cuda" if comm.rank else "cpu")


@on_gpus
def test_memory_of_a_gpu_that_is_out_on_one_rank_is_told_by_all(comm, tied, runtime):
    model = Llama(tied, device="cuda")
    with Session(comm, model, PROMPT[:8], capacity=9, scheme=Reduction(transport="host")) as session:
        if comm.rank == comm.size - 1:
            runtime.empty = mock.Mock(side_effect=BackendError("out of GPU memory"))
        with pytest.raises(BackendError, match="out of GPU memory"):
            session.prefill()
