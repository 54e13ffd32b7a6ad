"""Caches of fixed room, whose steps of one token are one graph of a compiled model; on an emulated GPU what
their operator queues is captured."""

import functools

import numpy as np
import pytest
import torch
import torch._dynamo as dynamo

from tests.support.cuda_tensors import CudaTensor, on_gpu, plain
from tests.support.sharded_models import check_text, way_of
from tests.support.tiny_models import assert_close, made, padded, prompt, wide
from treeattn import huggingface
from treeattn.decoder import Reduction
from treeattn.errors import ArgumentError, StateError, TransportError
from treeattn.huggingface import fixed, plans
from treeattn.huggingface.fixed import FixedLayer

GREEDY = {"do_sample": False, "max_new_tokens": 9}


@pytest.fixture(scope="module")
def model():
    """Attends by itself until it is compiled."""
    return made("Llama", num_hidden_layers=2)


@pytest.fixture
def graphs(model, monkeypatch):
    """What steps of the model are compiled to, as it is without a GPU: of each graph what it is given that no
    tensor is, and how many of the tensors stay where they are."""
    seen = []
    dynamo.reset()
    dynamo.utils.counters.clear()

    def backend(graph, given):
        if any(torch.is_tensor(one) and one.dtype == torch.int64 and one.shape == (2, 1) for one in given):
            nodes = zip(graph.graph.find_nodes(op="placeholder"), given, strict=True)
            told = [node.meta.get("tensor_dict", {}) for node, one in nodes if type(one) is torch.Tensor]
            static = sum(one.get("_dynamo_static_input_type") == "unguarded" for one in told)
            seen.append(([one for one in given if not torch.is_tensor(one)], static))
        return dynamo.lookup_backend("aot_eager")(graph, given)

    monkeypatch.setattr(model, "forward", torch.compile(model.forward, backend=backend, fullgraph=True))
    model.set_attn_implementation("treeattn")
    yield seen
    model.set_attn_implementation("eager")


def numbers_of_python(graphs):
    """Those of the one graph that all steps are, which writes to tensors whose addresses it may keep."""
    ((numbers, static),) = graphs
    assert not dynamo.utils.counters["graph_break"]
    assert static >= 3 * 2  # of each layer; buffers of the model are, too
    return numbers


@pytest.fixture
def cache(comm, model, request):
    """Made once the model attends by it."""
    return lambda capacity=40, **how: huggingface.ShardedKV(
        model.config, comm, capacity=capacity, fixed=True, **how
    )


@pytest.fixture(scope="module")
def wanted(model):
    """The text of transformers, 2 rows of 39 slots, and its logits."""
    text = model.generate(prompt(2), **GREEDY)
    with torch.no_grad():
        return text, model(text).logits


def test_steps_are_one_graph(wanted, model, graphs, cache):
    """Of tensors alone, for all tokens of all texts in rooms of one size."""
    text, _ = wanted
    whole, dealt = cache(), cache()
    huggingface.prefill(model, prompt(2)[:, :-1], dealt)
    for one in whole, dealt:
        assert model.generate(prompt(2), cache=one, **GREEDY).tolist() == text.tolist()
        assert one.get_seq_length() == 38
    assert not numbers_of_python(graphs)


@pytest.mark.parametrize("way", ["greedy", "beams", "prompt lookup"])
def test_a_model_that_is_not_compiled(comm, gpu, way):
    """On an emulated GPU, whose arrays are tensors there, too."""
    ids, given = way_of("Llama", way, 1)
    cache_of = functools.partial(huggingface.ShardedKV, comm=comm, capacity=40, fixed=True)
    kv = check_text(wide("Llama", num_hidden_layers=2), ids[:, 6:18], cache_of, **given | GREEDY)
    slots = kv.get_seq_length()
    for layer in kv.layers:
        assert int(plain(layer.count)) == slots
        for bound, array in ((layer.k, layer.shard.k), (layer.v, layer.shard.v)):
            assert type(bound) is CudaTensor
            assert bound.data_ptr() == gpu.address(array)
        layer._append(*(on_gpu(torch.full((*bound.shape[:1], 2, 1, 64), 7.0)) for _ in range(2)))
    kv.behind = True
    assert kv.get_seq_length() == slots + 1
    for layer in kv.layers:
        end = int(layer.shard.lengths[0])
        assert end == len(range(comm.rank, slots + 1, comm.size))
        last = plain(layer.k)[:, :end][:, -1]
        assert bool((last == 7).all()) == (slots % comm.size == comm.rank)


@pytest.mark.deep
@torch.no_grad()
def test_whatever_asks_for_slots_gets_those_of_the_device(comm, wanted, model, graphs, cache, folder):
    """In a loop of one's own, of which the host counts nothing."""
    text, logits = wanted
    kv, other = cache(), cache()
    with torch.compiler.set_stance("force_eager"):
        model(text[:, :30], cache=kv)

    def steps(*slots, rows=slice(None), kv=kv):
        for slot in slots:
            found = model(text[rows, slot : slot + 1].clone(), cache=kv).logits
            assert_close(found, logits[rows, slot : slot + 1])
        assert kv.behind

    steps(*range(30, 38))
    assert not numbers_of_python(graphs)
    assert "38 slots" in repr(kv)
    assert not kv.behind
    for layer in kv.layers:
        assert layer.shard.totals.tolist() == [38, 38]
        assert layer.shard.lengths.tolist() == [len(range(comm.rank, 38, comm.size))] * 2
    kv.crop(-5)
    steps(33, 34)
    kv.save(folder, unchecked=True)
    other.load(folder, unchecked=True)
    steps(35, 36, kv=other)
    steps(35)
    with torch.compiler.set_stance("force_eager"):
        assert_close(model(text[:, 36:], cache=kv).logits, logits[:, 36:])
    kv.crop(-3)
    steps(36)
    rows = torch.tensor([1, 0, 1])
    kv.batch_select_indices(rows)
    kv.batch_select_indices(torch.tensor([1, 2]))  # the first two again, in other arrays
    steps(37)
    kv.batch_select_indices(rows)
    steps(38, rows=rows)
    kv.reset()
    assert kv.get_seq_length() == 0


@pytest.mark.deep
def test_a_step_that_counts_on_the_host_is_caught(wanted, model, graphs, cache, monkeypatch):
    """It is another graph, which is given the number."""

    append = FixedLayer._append

    def counting(layer, *new):
        layer.count.fill_(layer._slots)
        layer._slots += 1
        append(layer, *new)

    monkeypatch.setattr(FixedLayer, "_append", counting)
    model.generate(prompt(2), cache=cache(), **GREEDY)
    assert numbers_of_python(graphs[-1:])


@pytest.mark.deep
@torch.no_grad()
def test_what_fixed_room_does_not_serve(comm, wanted, model, graphs, cache, folder):
    text, mask = wanted[0], padded(prompt(2))
    for family in "Mistral", "LFM2", "DeepSeek-V3":
        with pytest.raises(
            ArgumentError, match="fixed=True is (not for latents|for layers of full attention)"
        ):
            huggingface.ShardedKV(made(family, "treeattn").config, comm, capacity=9, fixed=True)
    if comm.size > 1:
        with pytest.raises(ArgumentError, match="fixed"):
            huggingface.ShardedKV(model.config, comm, capacity=40, fixed=comm.rank == 0)
    kv = cache()
    for wrong in (
        lambda: model.generate(prompt(2), attention_mask=mask, cache=kv, **GREEDY),
        lambda: huggingface.prefill(model, prompt(2), kv, mask),
    ):
        with pytest.raises(ArgumentError, match="rows with padding need"):
            wrong()
        kv.reset()
    small = cache(32)
    assert small.get_max_length() == -(-32 // comm.size) * comm.size
    with pytest.raises(ArgumentError, match=r"slots in room for 3\d need a larger cache"):
        model.generate(prompt(2), cache=small, **GREEDY)
    small.reset()
    with pytest.raises(ArgumentError, match="38 slots in room for 3"):
        huggingface.prefill(model, text[:, :38], small)
    huggingface.prefill(model, text[:, :28], kv)
    again = cache()
    kv.save(folder, unchecked=True)
    with pytest.raises(ArgumentError, match=r"28 slots in room for (9|1\d) need"):
        cache(9).load(folder, unchecked=True)
    again.load(folder, unchecked=True)
    with pytest.raises(ArgumentError, match="rows with padding need"):  # told by the first step alone
        model.generate(text[:, :29], attention_mask=mask[:, :29], cache=again, **GREEDY)
    with pytest.raises(Exception, match="leave attention_mask out of a compiled model's steps"):
        model(text[:, 28:29], attention_mask=torch.ones(2, 29), cache=kv)
    model(text[:, 28:29], cache=kv)
    with pytest.raises(Exception, match=r"call cache\.get_seq_length\(\) first"):
        model(text[:, 29:32], cache=kv)
    with pytest.raises(ArgumentError, match="^fixed=True is not for windows, softcap or tensor parallel"):
        kv.layers[0].step(torch.zeros(2, 4, 1, 16), plans.Scoring(0.25, softcap=3.0), None)
    for slot in range(29, kv.capacity):
        model(text[:, slot % 2 : slot % 2 + 1].clone(), cache=kv)
    with pytest.raises((IndexError, RuntimeError), match=f"out of .*bounds.*{kv.capacity // comm.size}"):
        model(text[:, :1].clone(), cache=kv)


@torch.no_grad()
def test_a_step_that_failed_is_noticed(wanted, model, graphs, cache, monkeypatch):
    """Some of its layers may have the token, and others not: Inductor writes in place."""
    text, logits = wanted
    kv, other = cache(), cache()
    for one in kv, other:
        model(text[:, :30], cache=one)
    layer = kv.layers[1]
    with monkeypatch.context() as patched:
        patched.setattr(plans.Plans, "step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fixed._step(torch.zeros(2, 4, 1, 16), layer.k, layer.v, layer.count, None, kv.plans_handle, 0.25)
    for asks in (lambda: model(text[:, 30:31].clone(), cache=kv), lambda: kv.crop(-1), kv.get_seq_length):
        with pytest.raises(Exception, match=r"half filled by a call that failed: cache\.reset\(\) empties"):
            asks()
    kv.reset()
    model(text[:, :30], cache=kv)
    for one in kv, other:
        assert_close(model(text[:, 30:31].clone(), cache=one).logits, logits[:, 30:31])
        assert one.get_seq_length() == 31


def test_what_the_operator_says_of_itself():
    q, k, v = (torch.randn(2, *rest) for rest in ((4, 1, 16), (9, 2, 16), (9, 2, 16)))
    for sinks in None, torch.zeros(4):
        torch.library.opcheck(
            torch.ops.treeattn.step.default, (q, k, v, torch.tensor([3, 9]), sinks, 0, 0.25)
        )
    assert torch.Tag.cudagraph_unsafe not in torch.ops.treeattn.step.default.tags


def attention_of(comm, q, k, v, lengths):
    """In float64, over the tokens of all ranks."""
    held = comm.allgather([plain(one)[0, : int(lengths)].double().numpy() for one in (k, v)])
    keys, values = (np.concatenate(parts).repeat(2, 1) for parts in zip(*held, strict=True))
    scores = np.einsum("hd,thd->ht", plain(q)[0, :, 0].double().numpy(), keys) * 0.125
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), values)


@pytest.fixture
def captured(comm, gpu, nccl_communicators):
    """Called: how far a graph of two layers' steps is from float64 when it is launched for other tokens; what
    makes lengths of a number on the device, and over which transport."""

    def launched(lengths=lambda count: count, transport=None, steps=9):
        fresh = comm.dup()
        fresh.kept = {}
        own = plans.Plans(fresh, Reduction(transport=transport))
        draw = torch.Generator().manual_seed(4)  # q is the same on all ranks
        q = on_gpu(torch.randn(1, 4, 1, 64, generator=draw))
        k, v = (on_gpu(torch.zeros(1, 8, 2, 64)) for _ in range(2))
        count, results = on_gpu(torch.ones(1, dtype=torch.int64)), []

        def step():
            results[:] = own.step(q.transpose(1, 2), k, v, lengths(count), 0.125)

        with pytest.raises(StateError, match="run one first"):
            gpu.capture(step)
        step()
        launch, worst = gpu.capture(step), 0.0
        for number in range(1, steps):
            q.copy_(torch.randn(q.shape, generator=draw))
            for one in k, v:
                one.normal_(generator=torch.Generator().manual_seed(100 * number + comm.rank))
            count.fill_(1 + number % 8)
            launch()
            found = plain(results[0])[0, 0].double().numpy()
            worst = max(worst, abs(found - attention_of(comm, q, k, v, plain(count))).max())
        own.synchronize()
        return max(comm.allgather(worst))

    return launched


@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_a_captured_operator(captured, transport):
    assert captured(transport=transport) < 1e-5


def test_lengths_of_the_time_of_capture_are_caught(captured):
    assert captured(lambda count: count.clone()) > 1e-2


def test_records_that_the_host_moves(comm, captured):
    if comm.size == 1:
        pytest.skip("one rank moves none")
    with pytest.raises(TransportError, match="'host' moves records by the host, which a CUDA graph cannot"):
        captured(transport="host")


def test_a_step_reads_nothing_of_the_gpu(comm, gpu, monkeypatch):
    """Nor does it allocate, once it is planned: what is read raises in the stand-in, but for these."""
    q, k, v = (on_gpu(torch.randn(1, *rest)) for rest in ((4, 1, 64), (8, 2, 64), (8, 2, 64)))
    given = q, k, v, on_gpu(torch.tensor([3])), None, 0, 0.125
    fixed._step(*given)
    for name in "cpu", "__bool__":
        monkeypatch.setattr(CudaTensor, name, lambda one: 1 / 0)
    before = gpu.allocations
    found = gpu.capture(lambda: fixed._step(*given))
    assert found
    assert gpu.allocations == before
