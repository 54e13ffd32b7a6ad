"""Models whose keys and values lie on GPUs, which are emulated: no tensor goes by the host unasked.
test_families.py has their logits."""

import functools
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.emulator.device_array import DeviceArray
from tests.support.cuda_tensors import CudaTensor, on_gpu, plain
from tests.support.frames import frames
from tests.support.sharded_models import check_text, way_of
from tests.support.tiny_models import padded, prompt, wide
from treeattn import cache_nodes, huggingface
from treeattn.attention import arrays
from treeattn.backends.cuda.device import Cuda
from treeattn.cache.sharded import CacheLayer
from treeattn.decoder import Decoder, Reduction, gpu_reducers
from treeattn.errors import ArgumentError, TransportError
from treeattn.huggingface import plans

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.fixture
def cache_of(comm):
    """With room for less than the text: it grows."""
    return lambda model: huggingface.ShardedKV(model.config, comm, capacity=16)


@pytest.mark.parametrize("way", ["greedy", "beams", "prompt lookup"])
def test_a_way_of_generate(comm, way):
    """Rows are reordered, and drafts cropped; the cache grows."""
    cache_of = functools.partial(huggingface.ShardedKV, comm=comm, capacity=16)
    ids, given = way_of("Llama", way, 1)
    check_text(wide("Llama", num_hidden_layers=2), ids[:, 6:18], cache_of, **given | {"max_new_tokens": 6})


@pytest.mark.parametrize("transport", ["peer", "nccl", "host"])
def test_how_records_travel(comm, gpu, nccl_communicators, monkeypatch, capfd, transport):
    """By peer memory, where it is not there by NCCL, and by the host where it is named, over ranks of MPI and
    of process groups."""

    def closed(*_):
        raise TransportError("no peer access")

    if transport == "nccl" and comm.rank == 0:
        monkeypatch.setattr(gpu, "expose", closed)
    gpu_reducers.say.cache_clear()
    fresh = comm.dup()
    fresh.kept = {}  # process groups have one for all duplicates
    how = {"capacity": 16, "scheme": Reduction(transport="host") if transport == "host" else None}
    cache_of = functools.partial(huggingface.ShardedKV, comm=fresh, **how)
    check_text(wide("Llama", num_hidden_layers=2), prompt(1, 12), cache_of, max_new_tokens=4)
    said = re.findall(r"^treeattn: .*transport='(\w+)'\)", capfd.readouterr().err, re.M)
    alone = comm.size == 1 or comm.rank > 0 or transport == "host"
    assert said == ([] if alone else [transport])
    assert bool(nccl_communicators) == (transport == "nccl" and comm.size > 1)


@torch.no_grad()
def test_a_long_prompt_is_no_hang(comm, cache_of, monkeypatch):
    """Whose host waits for its GPU after the last layer was queued: each layer that is reached counts."""
    if comm.size == 1:
        pytest.skip("one rank waits for nobody")
    reached, done = [], set()

    def event():
        reached.append(number := len(reached))
        return SimpleNamespace(record=bool, query=lambda: number in done)

    monkeypatch.setattr(torch.cuda, "Event", event)
    model = wide("Llama", "treeattn", num_hidden_layers=2)
    cache = cache_of(model)
    with cache.during():
        model(prompt(1, 12), cache=cache)  # of which each rank has all
        assert not cache._waits.blocking
        scores = model(prompt(1, 6), cache=cache).logits[:, -1]
        first, second, last = (done.add(number) or cache._waits.blocking for number in (None, 0, 1))
        assert 0 < first < second == last
        cache.agreed(scores)
        assert not cache._waits.blocking
        model(prompt(1, 1), cache=cache)
        assert cache._waits.blocking > last
    assert len(reached) == 2


def test_a_token_reads_nothing_of_a_gpu(cache_of, monkeypatch):
    """But the scores: what pads a text is told once, and generate() compares ids in place of keys."""
    reads = []
    for name in "cpu", "__bool__":
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(CudaTensor, name, lambda one, read=read: reads.append(one) or read(plain(one)))
    model, ids, counts = wide("GPT-OSS", "treeattn", num_hidden_layers=2), prompt(2, 12), []
    for tokens in 2, 6:
        model.generate(ids, attention_mask=padded(ids), cache=cache_of(model), max_new_tokens=tokens)
        counts.append(len(reads))
    assert counts[0] > 0
    assert counts[1] == 2 * counts[0]


@torch.no_grad()
def test_what_a_layer_of_a_token_costs_the_host():
    """Python functions of the package, which may only fall: of a rank alone, which waits for nobody."""
    model, layers = wide("Llama", "treeattn", num_hidden_layers=8), 8
    cache = huggingface.ShardedKV(model.config, plans.alone().comm, capacity=16)
    for tokens in 12, 1, 1:
        model(prompt(1, tokens), cache=cache)
    entered = frames(lambda: model(prompt(1, 1), cache=cache))
    assert len(entered) / layers <= 84


@pytest.mark.parametrize(
    ("step", "most"),
    [(lambda *arrays: arrays, 16), (lambda q, k, v: (q.clone(), k[:, :20], v[:, :20]), 37)],
    ids=["the same tensors", "new views"],
)
def test_what_a_step_of_tensors_costs_the_host(step, most):
    arrays_ = [on_gpu(torch.ones(1, tokens, heads, 64)) for tokens, heads in ((1, 8), (64, 2), (64, 2))]
    with Decoder(plans.alone().comm, heads=8, kv_heads=2, head_dim=64, dtype="float32", device="cuda") as one:
        for given in [step(*arrays_) for _ in range(3)]:
            entered = frames(lambda given=given: one(*given))
    assert len(entered) <= most


def test_what_goes_by_dlpack(gpu, monkeypatch):
    """Tensors that it refuses, and those of another stream, for which it waits; the stand-in's says that it
    was asked."""
    tensor = on_gpu(torch.ones(1, 1, 4, 8))
    assert arrays.on_gpu("q", tensor, gpu).shape == tensor.shape
    for refused in torch._neg_view(tensor), torch.ones(1, 1, 4, 8, requires_grad=True), torch.ones(1) > 0:
        with pytest.raises(ArgumentError, match="q (cannot be taken as it is|has elements)"):
            arrays.on_gpu("q", on_gpu(refused), gpu)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=9))
    with pytest.raises(ArgumentError, match="q cannot be taken as it is"):
        arrays.on_gpu("q", tensor, gpu)


def continued(comm, cache_of, folder):
    """A text by beams, and one whose prompt was dealt out, saved and loaded."""
    model, ids = wide("Llama", "treeattn", num_hidden_layers=2), prompt(2, 12)
    model.generate(ids, cache=cache_of(model), num_beams=2, max_new_tokens=3)
    cache = cache_of(model)
    huggingface.prefill(model, ids[:, :-1], cache)
    cache.save(folder)
    again = cache_of(model)
    again.load(folder, device="cuda")
    return model.generate(ids, cache=again, max_new_tokens=4, do_sample=False).tolist()


def test_a_prompt_computed_once(comm, cache_of, folder):
    wanted = (
        wide("Llama", num_hidden_layers=2).generate(prompt(2, 12), max_new_tokens=4, do_sample=False).tolist()
    )
    assert continued(comm, cache_of, folder) == wanted


@pytest.fixture
def written(comm, cache_of, folder):
    """Called: a cache that a prefill and beams have grown, whose rows were reordered; and, saved, one that
    was loaded."""

    def write(saved=True):
        model, ids = wide("Llama", "treeattn", num_hidden_layers=2), prompt(2, 12)
        cache, again = cache_of(model), cache_of(model)
        huggingface.prefill(model, ids[:, :-1], cache)
        cache.batch_repeat_interleave(2)
        model.generate(ids.repeat_interleave(2, 0), cache=cache, num_beams=1, max_new_tokens=8)
        if saved:
            cache.save(folder)
            again.load(folder, device="cuda")
        return cache, again

    return write


def test_caches_lie_in_the_memory_of_torchs_pool(gpu, written, monkeypatch):
    rooms, empty = [], torch.empty

    def counted(*given, **named):
        made = empty(*given, **named)
        rooms.extend([made] if made.device.type == "cuda" else [])
        return made

    monkeypatch.setattr(torch, "empty", counted)
    for cache in written():
        for layer in cache.layers:
            for array in layer.shard.arrays:
                at = gpu.address(array)
                assert any(room.data_ptr() <= at < room.data_ptr() + room.numel() for room in rooms)


def test_work_is_queued_to_torchs_current_stream(comm, gpu, written, nccl_communicators, monkeypatch):
    """As under ``torch.cuda.stream``, and waited for once, where a prefill leaves its ring, by NCCL."""
    waits, streams, queue, put = [], set(), gpu.queue, DeviceArray.__setitem__

    def queued(work):
        streams.add(gpu.stream)
        queue(work)

    def assigned(array, index, value):
        streams.add(gpu.stream)
        put(array, index, value)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(gpu, "queue", queued)
    monkeypatch.setattr(DeviceArray, "__setitem__", assigned)
    written()
    assert streams == {7}
    synchronize = gpu.synchronize
    monkeypatch.setattr(gpu, "synchronize", lambda: waits.append(synchronize()))
    written(saved=False)
    assert len(waits) == (comm.size > 1)
    assert len(nccl_communicators) == 2 * (comm.size > 1)


def copied_by_numpy(layer, rows):
    for array in layer.arrays:
        array[:] = np.copy(array)[rows]


def test_a_model_whose_keys_lie_on_cache_nodes(comm):
    """There, on hosts: what a GPU computed is sent, and the result is brought back."""
    if comm.size == 1 or comm.library == "torch":
        pytest.skip("cache nodes are other ranks of mpiexec")
    if comm.rank:
        cache_nodes.serve(comm)
        return
    with cache_nodes.connect(comm) as nodes:
        cache_of = functools.partial(huggingface.ShardedKV, capacity=64, nodes=nodes)
        check_text(wide("Llama", num_hidden_layers=2), prompt(), cache_of, max_new_tokens=4)


FORGOTTEN = {
    "append": (CacheLayer, "_as_stored", lambda layer, *given: given),
    "decode": (huggingface.attention, "as_rows", lambda states: states.numpy()),
    "select": (CacheLayer, "select", copied_by_numpy),
    "save": (Cuda, "to_host", lambda device, array: np.asarray(array)),
    "result": (huggingface.attention, "finished", lambda out, *_: torch.from_numpy(out.numpy())),
}


@pytest.mark.parametrize("place", FORGOTTEN)
def test_a_forgotten_conversion_is_caught(comm, cache_of, folder, monkeypatch, place):
    monkeypatch.setattr(*FORGOTTEN[place])
    said = "of a tensor on a GPU|Implicit conversion of an array of the device"
    with pytest.raises((TypeError, ArgumentError), match=said):
        continued(comm, cache_of, folder)
