"""Llamas on emulated GPUs: Hugging Face's logits, the processor's tokens, and no array in the wrong place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.emulator.raw_module import compiler_problem
from tests.emulator.runtime import StrictRuntime
from tests.llama_models import MODELS, PROMPT, write_model
from treeattn.backends.cuda import cupy_runtime
from treeattn.decoder.device import Cuda
from treeattn.errors import (
    ArgumentError,
    BackendError,
    RestrictionError,
    TransportError,
    TreeattnError,
)
from treeattn.llama import Llama, Session
from treeattn.llama.drafts import ModelDrafts, NgramDrafts
from treeattn.llama.generate import Drafting, generate
from treeattn.llama.linear import Linear
from treeattn.llama.rope import rotation

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem())),
]

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "llama" / "logits.npz")
_WAYS = [("replicated", "ring"), ("sharded", "gather")]
#: Every model one way, in turn, and one of them both ways.
CASES = [*zip(MODELS, _WAYS * 5, strict=True), ("biases", _WAYS[0])]
CASES = [(name, *way) for name, way in CASES]
#: As wide as a kernel that there is: nothing is filled up.
WIDE = {"head_dim": 64}


@pytest.fixture(autouse=True)
def runtime(comm, monkeypatch):
    """What device="cuda" finds on this rank."""
    emulator = StrictRuntime()
    emulator.identity = f"emulated GPU {comm.rank}"
    monkeypatch.setattr(cupy_runtime, "current", lambda: emulator)
    return emulator


@pytest.fixture(params=["replicated", "sharded"])
def weights(request):
    return request.param


@pytest.fixture
def written(comm, tmp_path):
    """Called with a name and changes: the directory of that model, written by rank 0."""
    path = comm.bcast(tmp_path)

    def write(name, **changes):
        if comm.rank == 0:
            write_model(path, name, **changes)
        comm.Barrier()
        return path

    return write


def assert_logits(got, wanted):
    assert type(got) is np.ndarray
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "weights", "prefill"), CASES)
def test_logits_and_tokens_are_hugging_faces(comm, written, name, weights, prefill):
    if comm.size > 3 and name != "biases":
        pytest.skip("the emulator takes its time: all models on 1 to 3 ranks")
    model = Llama(written(name), comm if weights == "sharded" else None, device="cuda")
    wanted, tokens = GOLDEN[f"{name}.logits"], GOLDEN[f"{name}.tokens"]
    capacity = len(PROMPT) + len(wanted)
    with Session(comm, model, PROMPT, capacity=capacity, prefill=prefill, transport="host") as session:
        logits = session.prefill()
        for row, token in zip(wanted, tokens, strict=False):
            assert_logits(logits, row)
            assert session.choose(logits) == token
            logits = session.step(int(token))


@pytest.mark.parametrize("prefill", ["ring", "gather"])
def test_a_prompt_of_fewer_tokens_than_ranks(comm, written, weights, prefill):
    model = Llama(written("biases"), comm if weights == "sharded" else None, device="cuda")
    with Session(comm, model, PROMPT[:3], capacity=9, prefill=prefill, transport="host") as session:
        assert_logits(session.prefill(), GOLDEN["biases.short"])


@pytest.mark.parametrize("prefill", ["ring", "gather"])
def test_a_prompt_of_more_queries_than_a_launch_takes(comm, written, monkeypatch, prefill):
    monkeypatch.setattr(Cuda, "most_queries", lambda self, heads, kv_heads: 4)
    directory, prompt = written("tied"), PROMPT[:37]
    found = {}
    for device, transport in (("cuda", "host"), ("cpu", None)):
        model, given = Llama(directory, device=device), {"prefill": prefill, "transport": transport}
        with Session(comm, model, prompt, capacity=len(prompt), **given) as session:
            found[device] = session.prefill()
    assert_logits(found["cuda"], found["cpu"])


@pytest.mark.slow
@pytest.mark.parametrize("draft", [None, "ngram", "model"])
@pytest.mark.parametrize("changes", [{}, WIDE], ids=["filled", "wide"])
def test_tokens_are_those_of_the_processor(comm, written, weights, draft, changes):
    """The text repeats itself, so that drafts are found."""
    directory, prompt, count = written("biases", **changes), [*PROMPT[:20].tolist()] * 2, 12
    capacity, drafts = len(prompt) + count, 6 if draft else 0
    found = {}
    for device in ("cpu", "cuda"):
        model = Llama(directory, comm if weights == "sharded" else None, device=device)
        makers = {
            None: lambda: None,
            "ngram": NgramDrafts,
            "model": lambda device=device: ModelDrafts(directory, 256, capacity, device=device),
        }
        drafter = makers[draft]() if comm.rank == 0 else None
        transport = "host" if device == "cuda" else None
        with Session(comm, model, prompt, capacity=capacity, drafts=drafts, transport=transport) as session:
            drafting = Drafting(drafts, drafter) if draft else None
            found[device] = generate(comm, session, prompt, count, drafting=drafting)
    assert found["cuda"].tokens == found["cpu"].tokens
    assert found["cuda"].accepted == found["cpu"].accepted
    assert sum(found["cuda"].accepted) > 0 or draft != "model"


@pytest.mark.parametrize("scheme", ["recursive_doubling", "nccl_allreduce"])
def test_records_travel_over_nccl(comm, written, communicators, scheme):
    directory = written("tied")
    model = Llama(directory, device="cuda")
    given = {"capacity": len(PROMPT[:40]) + 4, "transport": "nccl", "scheme": scheme}
    with Session(comm, model, PROMPT[:40], **given) as session:
        token = session.choose(session.prefill())
        logits = [session.step(token) for _ in range(3)]
    with Session(comm, Llama(directory), PROMPT[:40], capacity=44) as session:
        assert session.choose(session.prefill()) == token
        for row in logits:
            assert_logits(row, session.step(token))
    assert communicators


def test_what_a_gpu_does_not_serve(comm, written):
    model = Llama(written("tied"), device="cuda")
    with pytest.raises(RestrictionError, match="kv_ring is for device='cpu'"):
        Session(comm, model, [3], capacity=8, scheme="kv_ring")
    if comm.size > 1:
        with pytest.raises(TransportError, match="needs a transport"):
            Session(comm, model, [3], capacity=8)
    wide = Llama(written("tied", head_dim=512), device="cuda")
    with pytest.raises(BackendError, match="no CUDA kernel for head_dim 512: 256 is the widest"):
        Session(comm, wide, [3], capacity=8, transport="host")


def test_ranks_must_have_the_model_on_devices_of_one_kind(comm, written):
    if comm.size == 1:
        pytest.skip("one rank cannot contradict itself")
    with pytest.raises(
        ArgumentError, match="the model's device differs between ranks: 'cpu' on rank 0, 'cuda"
    ):
        Llama(written("tied"), comm, device="cuda" if comm.rank else "cpu")


def test_memory_of_a_gpu_that_is_out_on_one_rank_is_told_by_all(comm, written, runtime):
    """While the prompt is planned: nobody waits."""

    def full(shape, dtype):
        raise BackendError("out of GPU memory")

    model = Llama(written("tied"), device="cuda")
    with Session(comm, model, PROMPT[:8], capacity=9, transport="host") as session:
        if comm.rank == comm.size - 1:
            runtime.empty = full
        with pytest.raises(BackendError, match="out of GPU memory"):
            session.prefill()


def test_weights_go_to_the_gpu_once(comm, written, weights, runtime):
    """Each rank's own, in float32; a step moves none of them."""
    shared = comm if weights == "sharded" else None
    model, moved = Llama(written("biases"), shared, device="cuda"), []
    assert model.weight_bytes == Llama(written("biases"), shared).weight_bytes
    with Session(comm, model, PROMPT[:8], capacity=12, transport="host") as session:
        token, copy = session.choose(session.prefill()), runtime.copy
        runtime.copy = lambda into, source: moved.append(into.nbytes) or copy(into, source)
        session.step(token)
    assert moved
    assert max(moved) < 2000  # logits, or the records of all heads; no matrix is that small


def _broadcast(self, tokens, positions, attend, dealt=False):
    self._comm.Bcast(self.model.device.memory.empty((len(tokens), 96), np.float32))


MISTAKES = {
    "tokens that index the embedding stay on the host": lambda patch: patch.setattr(
        "treeattn.llama.vocabulary.Vocabulary.vectors",
        lambda self, tokens, dealt=False: self.embedding[tokens],
    ),
    "angles stay on the host": lambda patch: patch.setattr(
        "treeattn.llama.model.Llama._rotation",
        lambda self, positions: rotation(positions, self._frequencies),
    ),
    "a bias stays on the host": lambda patch: patch.setattr(
        Linear, "_biased", lambda self, y: y + np.zeros(y.shape[1], np.float32)
    ),
    "a function of NumPy": lambda patch: patch.setattr(
        "treeattn.llama.model.Llama._normed", lambda self, x, weight: np.sqrt(x)
    ),
    "a method that CuPy is not known to have": lambda patch: patch.setattr(
        Linear, "_biased", lambda self, y: y.byteswap()
    ),
    "MPI is given an array of the GPU": lambda patch: patch.setattr(
        "treeattn.decoder.device.Cuda.readable", lambda self, array: array
    ),
    "MPI is given the array itself": lambda patch: patch.setattr(Session, "_run", _broadcast),
    "the cache is indexed by the host": lambda patch: patch.setattr("treeattn.cache._as_slice", np.asarray),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_arrays_of_the_host_and_of_the_gpu_are_never_mixed(comm, written, monkeypatch, mistake):
    """What CuPy would refuse is an error with the stand-ins, too."""
    directory = written("biases")
    MISTAKES[mistake](monkeypatch)
    refused = (TypeError, AttributeError, TreeattnError)  # the last: of another kind, as all ranks are told
    with pytest.raises(refused, match="DeviceArray|array of the (host|device)|buffer"):  # noqa: SIM117
        with Session(
            comm, Llama(directory, device="cuda"), PROMPT[:8], capacity=9, transport="host"
        ) as session:
            session.step(session.choose(session.prefill()))
