"""Every way of generate() goes on as with transformers' own attention, and all ranks alike."""

import functools

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.sharded_models import WAYS, check_text, way_of
from tests.support.tiny_models import assert_close, made, padded, prompt
from treeattn import cache_nodes, huggingface
from treeattn.errors import ArgumentError, StateError

GATE = [("Mistral", "assistant")]  # which crops windows
OWN_GATE = [("Mistral", "beams"), ("Mistral", "assistant"), ("GPT-OSS", "prefill in chunks")]
CASES = [
    pytest.param(family, way, marks=() if family == "Llama" or (family, way) in GATE else pytest.mark.deep)
    for family in ("Llama", "Gemma 2", "GPT-OSS", "Mistral")
    for way in WAYS
    if way != "padded"  # test_families.py
]


@pytest.mark.parametrize(("family", "way"), CASES)
def test_a_way_of_generate(comm, family, way):
    """Ranks that were seeded otherwise draw as rank 0 does; the cache grows."""
    ids, given = way_of(family, way)
    cache_of = functools.partial(huggingface.ShardedKV, comm=comm, capacity=16)
    check_text(made(family), ids, cache_of, comm.rank, **given)


#: Over cache nodes: some ways of one family, and padded rows of others.
OTHERS = "Gemma 2", "GPT-OSS", "Mistral"
ON_NODES = ("greedy", "padded", "beams", "return sequences", "prompt lookup", "prefill in chunks")
NODE_CASES = [("Llama", way) for way in ON_NODES] + [(family, "padded") for family in OTHERS]
NODE_CASES += [("DeepSeek-V3", way) for way in ("padded", "beams")]


@pytest.mark.parametrize(("family", "way"), NODE_CASES)
def test_a_way_over_cache_nodes(comm, family, way):
    if comm.size == 1 or comm.library == "torch":
        with pytest.raises(ArgumentError, match="mpiexec"):
            cache_nodes.connect(comm)
        return
    if comm.rank:
        cache_nodes.serve(comm)
        return
    with cache_nodes.connect(comm) as nodes:
        for known in (True, nodes):  # the second time the memory of the first cache is free again
            ids, given = way_of(family, way)
            cache_of = functools.partial(huggingface.ShardedKV, comm=comm, capacity=64, nodes=known)
            check_text(made(family), ids, cache_of, **given)


OWN = [
    pytest.param(family, way, marks=() if (family, way) in OWN_GATE else pytest.mark.deep)
    for family in ("Mistral", "Gemma 2", "GPT-OSS", "Qwen3 with windows", "Phi-3.5-MoE")
    for way in ("greedy", "beams", "prompt lookup", "assistant", "prefill in chunks")
]


@pytest.mark.parametrize(("family", "way"), OWN)
def test_a_way_over_the_cache_of_transformers(family, way):
    """Whose windows hand over their last keys, cropped and reordered too: rows that are padded on the left
    have eager's logits."""
    model, (ids, given), found = made(family), way_of(family, way, 3), []
    given |= {"output_logits": True, "attention_mask": padded(prompt(3, 24))[-len(ids) :]}
    for attention in ("eager", "treeattn"):
        model.set_attn_implementation(attention)
        own = transformers.DynamicCache(config=model.config)
        found.append(model.generate(ids, past_key_values=own, return_dict_in_generate=True, **given))
    wanted, got = (torch.stack(one.logits) for one in found)
    assert found[0].sequences.tolist() == found[1].sequences.tolist()
    assert_close(got, wanted)


def last_bit(model, ids):
    """A token that is as likely as the first of the text, and on all ranks but 0 more so by a last bit."""
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[0, -1]
        likely = int(model.lm_head(hidden).argmax())
        rows = model.lm_head.weight
        rows[likely + 1] = rows[likely]
        return likely + 1, torch.nextafter(rows[likely], hidden.sign() * torch.inf)


@pytest.mark.parametrize("way", ["greedy", "sampling", "beams", "assistant"])
def test_ranks_that_would_part_go_on_with_rank_0(comm, way):
    """Weights that differ in a last bit, where two tokens are as likely; the assistant's are others."""
    model, ids = made("Llama"), prompt()
    token, more_likely = last_bit(model, ids)
    given = way_of("Llama", way)[1] | {"max_new_tokens": 8}
    torch.manual_seed(11)
    wanted = model.generate(ids, **given)
    if comm.rank:
        with torch.no_grad():
            model.lm_head.weight[token] = more_likely
            getattr(given.get("assistant_model"), "lm_head", torch.nn.Linear(1, 1)).weight.neg_()
        alone = model.generate(ids, do_sample=False, max_new_tokens=8)
        assert alone[0, ids.shape[1]] == token  # which a rank for itself would take
    model.set_attn_implementation("treeattn")
    torch.manual_seed(11)
    cache = huggingface.ShardedKV(model.config, comm, capacity=64)
    assert model.generate(ids, cache=cache, **given).tolist() == wanted.tolist()


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("given", [{"max_new_tokens": 6}, {"num_beams": 2, "max_new_tokens": 1}])
def test_ranks_that_draw_otherwise_are_told(comm, monkeypatch, family, given):
    """Of the same scores, whose probabilities may differ in a last bit: before the cache has such a token, or
    at the end; also of windows alone, which send nothing."""
    if comm.size == 1:
        pytest.skip("one rank has nobody to differ from")
    model, draw = made(family, "treeattn"), torch.multinomial
    if comm.rank:
        monkeypatch.setattr(torch, "multinomial", lambda *given, **named: (draw(*given, **named) + 1) % 97)
    cache = huggingface.ShardedKV(model.config, comm, capacity=64)
    with pytest.raises(ArgumentError, match="ids differs between ranks"):
        model.generate(prompt(2), past_key_values=cache, do_sample=True, **given)
    assert cache.get_seq_length() == 30
    cache.reset()
    with pytest.raises(StateError, match="is at another call: .*; this is rank .*, at "):
        model.generate(prompt(), cache=cache, do_sample=False, max_new_tokens=4 if comm.rank else 5)


@pytest.mark.parametrize("other", ["weights", "mask", "padding token", "positions"])
def test_ranks_that_differ_in_more_than_ids_are_told(comm, other):
    """Equal ids have other keys then, and ranks would mix them."""
    if comm.size == 1:
        pytest.skip("one rank has nobody to differ from")
    model, ids, given = made("Llama", "treeattn"), prompt(2), {}
    if other == "weights" and comm.rank:
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    if other == "mask":
        given["attention_mask"] = padded(ids).float()
        given["attention_mask"][1, : 9 if comm.rank else 5] = 0
    if other == "padding token":
        ids = ids.clamp(min=2)
        ids[1, :4] = 0
        model.generation_config.pad_token_id = comm.rank and 1
    if other == "positions":
        given["position_ids"] = torch.arange(ids.shape[1]).expand(2, -1) + (40 if comm.rank else 0)
    cache = huggingface.ShardedKV(model.config, comm, capacity=64)
    with pytest.raises(ArgumentError, match="ranks were given different tokens"):
        model.generate(ids, cache=cache, do_sample=False, max_new_tokens=5, **given)


def test_a_second_model_of_a_processor_has_its_own_padding(comm):
    """Though it has the same config object, whose cache generates."""
    model, ids, seen = made("Llama", "treeattn"), prompt(2), []
    other, own = type(model)(model.config).eval(), transformers.DynamicCache(config=model.config)
    mask = torch.ones(2, ids.shape[1] + 3, dtype=torch.int64)
    mask[1, :12] = 0

    def also(ids, scores):
        begin, end = own.get_seq_length(), ids.shape[1]
        seen.append(
            other(ids[:, begin:], attention_mask=mask[:, :end], past_key_values=own).logits[:, -1].detach()
        )
        return scores

    cache = huggingface.ShardedKV(model.config, comm, capacity=64)
    given = {
        "attention_mask": padded(ids),
        "do_sample": False,
        "max_new_tokens": 3,
        "logits_processor": [also],
    }
    text = model.generate(ids, cache=cache, **given)[:, :-1]
    other.set_attn_implementation("eager")
    assert_close(seen[-1], other(text, attention_mask=mask[:, : text.shape[1]]).logits[:, -1].detach())


@torch.no_grad()
def test_a_loop_of_ones_own_agrees_or_is_told(comm):
    model, ids = made("Llama"), prompt()
    token, more_likely = last_bit(model, ids)
    wanted = model.generate(ids, do_sample=False, max_new_tokens=4)[:, ids.shape[1] :]
    if comm.rank:
        model.lm_head.weight[token] = more_likely
    model.set_attn_implementation("treeattn")
    cache = huggingface.ShardedKV(model.config, comm, capacity=64)
    given, text = ids, []
    for _ in range(4):
        given = cache.agreed(model(given, past_key_values=cache).logits[:, -1]).argmax(1, keepdim=True)
        text.append(given)
    assert torch.cat(text, 1).tolist() == wanted.tolist()
    cache.reset()
    with pytest.raises(ArgumentError, match="use_cache=False would cache every token anew"):
        model.generate(ids, past_key_values=cache, use_cache=False, max_new_tokens=4)
    given = model(ids, past_key_values=cache).logits[:, -1].argmax(1, keepdim=True)
    if comm.size > 1:
        with pytest.raises(ArgumentError, match=r"different tokens: .* go on with cache\.agreed\(scores\)$"):
            model(given, past_key_values=cache)
        cache.reset()
        with pytest.raises(ArgumentError, match="max_time: ranks would stop at different tokens"):
            model.generate(ids, past_key_values=cache, max_time=9.0, max_new_tokens=4)


@pytest.mark.deep
@pytest.mark.parametrize("family", ["Llama", "Mistral", "DeepSeek-V3"])
def test_one_graph_of_torch_compile(comm, family):
    """Traced as a whole, without a break: once for the prefill, and once for all tokens."""
    import torch._dynamo as dynamo

    model, ids = made(family, num_hidden_layers=2), prompt(2)
    given = {"attention_mask": padded(ids), "do_sample": False, "max_new_tokens": 9}
    wanted = model.generate(ids, **given)
    model.set_attn_implementation("treeattn")
    dynamo.reset()
    dynamo.utils.counters.clear()
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True, dynamic=True)
    cache = huggingface.ShardedKV(model.config, comm, capacity=32)  # it grows
    got = model.generate(ids, cache=cache, **given)
    assert got.tolist() == wanted.tolist()
    assert not dynamo.utils.counters["graph_break"]
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_operators_of_a_compiled_model():
    """What they say of themselves is so; no CUDA graph takes them in, and where rows begin is on the host,
    for all layers at once, though the mask lies on a GPU."""
    q, k, v = (torch.randn(2, heads, 5, 16) for heads in (4, 2, 2))
    begins, mask = torch.tensor([0, 2]), torch.ones(2, 5)
    operators = torch.ops.treeattn.attend.default, torch.ops.treeattn.begins.default
    for begin, sinks in ((None, None), (begins, torch.zeros(4))):
        torch.library.opcheck(operators[0], (q, k, v, begin, sinks, 0, 0, 0, 0.25, 3, 0.0))
    torch.library.opcheck(operators[1], (mask, 5, 2))
    for operator in operators:
        assert torch.Tag.cudagraph_unsafe in operator.tags
    with FakeTensorMode():
        assert operators[1](torch.ones(2, 5, device="cuda"), 5, 2).device.type == "cpu"
