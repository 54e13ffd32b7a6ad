"""What would give another text is an error in one line, on all ranks; what transformers asks of a cache is
told in slots of the whole sequence."""

import copy
import pickle
import warnings

import pytest
import torch
import transformers
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.support.sharded_models import check_text
from tests.support.tiny_models import assert_close, made, padded, prompt
from treeattn import huggingface
from treeattn.errors import ArgumentError, StateError, TreeattnError
from treeattn.huggingface import plans
from treeattn.huggingface.layers import FullAttentionLayer


@pytest.fixture(scope="module")
def model():
    return made("Llama", "treeattn")


@pytest.fixture
def cache(comm, model):
    return huggingface.ShardedKV(model.config, comm, capacity=64)


def refused(match, call, *given, **named):
    with pytest.raises(TreeattnError, match=match) as raised, torch.no_grad():
        call(*given, **named)
    assert len(str(raised.value).splitlines()) == 1
    assert len(str(raised.value)) < 250


def test_attention_and_mask_are_registered():
    """Without a mask function transformers would pass no mask, and not say so."""
    assert "treeattn" in ALL_ATTENTION_FUNCTIONS.valid_keys()
    assert "treeattn" in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()


#: What is made of a configuration -> what is said of it.
NOT_SERVED = [
    *(
        (name, {}, "does not go through transformers' attention")
        for name in ("Bloom", "Mpt", "Falcon", "XGLM")
    ),
    ("RecurrentGemma", {}, "a state of its own"),  # it would go on with that of the text before
    ("Llama4Text", {"num_hidden_layers": 4, "attention_chunk_size": 8}, "layers of 'chunked_attention' are"),
]


@pytest.mark.parametrize(("family", "given", "match"), NOT_SERVED)
def test_a_family_that_is_not_served_is_refused_whatever_name_it_takes(comm, family, given, match):
    config = getattr(transformers, f"{family}Config")(**given)
    config._attn_implementation_internal = "treeattn"
    refused(match, huggingface.ShardedKV, config, comm, capacity=64)


def test_a_model_that_goes_another_way_is_refused_at_its_first_keys(comm, monkeypatch):
    """Nobody knows it by its name. After its one layer no other could notice; with padding it knows another
    mask."""
    from transformers.models.llama import modeling_llama

    def eager(*_):
        return modeling_llama.eager_attention_forward

    monkeypatch.setattr(modeling_llama.ALL_ATTENTION_FUNCTIONS, "get_interface", eager)
    other = made("Llama", "treeattn", num_hidden_layers=1)
    kv = huggingface.ShardedKV(other.config, comm, capacity=64)
    for given in {}, {"attention_mask": padded(prompt(3))}:
        refused("does not go through transformers'", other, prompt(3), past_key_values=kv, **given)
        kv.reset()
    refused("does not go through transformers'", huggingface.prefill, other, prompt(), kv)


@torch.no_grad()
def test_one_layer_that_nothing_attends_to_is_told_so(comm, monkeypatch):
    """Where no mask and no second layer notices: no call has failed."""
    from transformers.models.llama import modeling_llama

    def values(_module, _query, _key, value, _mask, **_):
        return value.repeat_interleave(2, 1).transpose(1, 2), None

    monkeypatch.setattr(modeling_llama.ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *_: values)
    other = made("Llama", "treeattn", num_hidden_layers=1)
    kv = huggingface.ShardedKV(other.config, comm, capacity=64)
    other(prompt(), past_key_values=kv)
    refused("'treeattn' did not attend to them", other, prompt(1, 1), past_key_values=kv)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_prefill_by_another_attention(comm, family):
    """Layers of windows ask nobody whether they were attended."""
    kv = huggingface.ShardedKV(made(family, "treeattn").config, comm, capacity=64)
    refused("load the model with attn_impl", huggingface.prefill, made(family, "sdpa"), prompt(), kv)
    assert kv.get_seq_length() == 0


@pytest.mark.parametrize("before", [0, 8])
@pytest.mark.parametrize("layers", [1, 2])
def test_no_crop_makes_a_half_filled_layer_whole(comm, monkeypatch, layers, before):
    model = made("Llama", "treeattn", num_hidden_layers=layers)
    kv, update = huggingface.ShardedKV(model.config, comm, capacity=64), FullAttentionLayer.update

    def interrupted(layer, *given, **named):
        found = update(layer, *given, **named)
        if layer is kv.layers[-1]:
            raise KeyboardInterrupt
        return found

    if before:
        huggingface.prefill(model, prompt()[:, :before], kv)
    with monkeypatch.context() as patched:
        patched.setattr(FullAttentionLayer, "update", interrupted)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(prompt()[:, before:], cache=kv)
    with pytest.raises(StateError, match="half filled"):
        kv.crop(-1)
    with pytest.raises(TreeattnError), torch.no_grad():
        model(prompt()[:, -1:], cache=kv)
    kv.reset()
    check_text(made("Llama", num_hidden_layers=layers), prompt(), lambda _: kv, max_new_tokens=3)


def test_another_attention_than_the_one_registered(comm, model):
    eager = made("Llama", "sdpa")
    refused("attends by 'sdpa'", huggingface.ShardedKV, eager.config, comm, capacity=64)
    kv = huggingface.ShardedKV(model.config, comm, capacity=64)
    refused("did not attend to them", eager.generate, prompt(), past_key_values=kv, max_new_tokens=2)


HOLE = torch.ones(3, 30, dtype=torch.int64)
HOLE[1, 2] = 0
PACKED = torch.cat([torch.arange(17), torch.arange(13)])[None].expand(3, -1)


@pytest.mark.parametrize(
    ("match", "given"),
    [
        ("pad on the left", {"attention_mask": padded(prompt(3)).flip(1)}),
        ("row 1 has a zero inside the text, at slot 2", {"attention_mask": HOLE}),
        ("4 dimensions", {"attention_mask": torch.ones(3, 1, 30, 30, dtype=torch.bool)}),
        ("neither causal", {"position_ids": PACKED, "use_cache": False, "past_key_values": None}),
        ("output_attentions", {"output_attentions": True}),
    ],
)
def test_what_a_call_of_the_model_may_not_ask_for(model, cache, match, given):
    refused(match, model, prompt(3), **{"past_key_values": cache} | given)
    model(prompt(), use_cache=False)  # nobody is left waiting


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_rows_that_are_nothing_but_padding_so_far(comm, family):
    """A chunk, or a prefill, may end before a short text begins, and a window be past its beginning."""
    model = made(family, "treeattn")
    ids, mask = prompt(2, 20), torch.ones(2, 20, dtype=torch.int64)
    mask[1, :19] = 0
    greedy = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 5}
    wanted = made(family).generate(ids, **greedy).tolist()
    kv = huggingface.ShardedKV(model.config, comm, capacity=64)
    assert model.generate(ids, past_key_values=kv, prefill_chunk_size=7, **greedy).tolist() == wanted
    kv.reset()
    huggingface.prefill(model, ids[:, :-1], kv, mask[:, :-1])
    assert model.generate(ids, past_key_values=kv, **greedy).tolist() == wanted


@pytest.mark.parametrize("family", ["Phi-3.5-MoE", "Qwen2-MoE"])
def test_a_window_that_only_the_mask_tells(family):
    """PhiMoE passes no sliding_window= to attention; without a cache nobody else knows it. Qwen2-MoE makes
    the mask of a window of 0, for no layer."""
    ids, mask = prompt(2), padded(prompt(2))
    for given in ({}, {"attention_mask": mask}):
        wanted = made(family)(ids, use_cache=False, **given).logits
        assert_close(made(family, "treeattn")(ids, use_cache=False, **given).logits, wanted, mask.bool())


def test_a_layer_that_attends_twice(comm):
    """DiffLlama attends to halves of the values, of which the first would be cached for both."""
    twice = made("DiffLlama", "treeattn")
    kv = huggingface.ShardedKV(twice.config, comm, capacity=64)
    refused("DiffLlamaAttention attends twice", twice, prompt(), past_key_values=kv)


def test_patterns_that_only_a_mask_function_tells(model):
    """Images: the rule has to be looked at, in every row and for every query."""

    def image(batch_idx, head_idx, q_idx, kv_idx):
        return (q_idx < 3) & (kv_idx < 3) & (batch_idx == 1)

    embeds = torch.zeros(2, 700, 8)
    given = {"inputs_embeds": embeds, "attention_mask": None, "past_key_values": None}
    made_mask = masking_utils.create_causal_mask(model.config, **given)
    assert made_mask.keys == 700
    refused("neither causal", masking_utils.create_causal_mask, model.config, or_mask_function=image, **given)


def test_arguments_that_would_change_the_result(model):
    layer = model.model.layers[0].self_attn
    qkv = [torch.zeros(1, heads, 3, 16) for heads in (4, 2, 2)]
    attention = ALL_ATTENTION_FUNCTIONS["treeattn"]
    refused("position_bias", attention, layer, *qkv, None, position_bias=torch.zeros(1))
    refused("a_new_one", attention, layer, *qkv, None, a_new_one=1)
    refused("dropout", attention, layer, *qkv, None, dropout=0.1)
    refused("not causal", attention, layer, *qkv, None, is_causal=False)
    assert attention(layer, *qkv, None, position_ids=1, use_cache=True)[0].shape == (1, 3, 4, 16)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_a_static_cache(family):
    given = {"cache_implementation": "static", "max_new_tokens": 2, "disable_compile": True}
    refused("static cache", made(family, "treeattn").generate, prompt(), **given)


def test_there_is_no_gradient(model):
    """Forward is allowed where gradients are on; what asks for one is told."""
    loss = model(prompt(), use_cache=False).logits.sum()
    with pytest.raises(RuntimeError, match="treeattn.attend"):
        loss.backward()


@torch.no_grad()
def test_lengths_are_slots_of_the_whole_sequence(comm, model, cache):
    """On every rank, pads included, whatever the rank holds; a crop is told how many to take away."""
    ids, mask = prompt(2), padded(prompt(2))
    model(ids, attention_mask=mask, past_key_values=cache)
    layer = cache.layers[0]
    assert (cache.get_seq_length(), cache.get_mask_sizes(3, 0)) == (30, (33, 0))
    assert (cache.get_query_offset(), cache.get_max_length()) == (30, -1)
    assert layer.keys is None
    assert sum(comm.allgather(int(layer.shard.lengths[0]))) == 30
    assert cache.is_croppable
    assert not cache.is_compileable
    assert not layer.supports_early_init
    cache.crop(-4)
    assert cache.get_seq_length() == 26
    with pytest.raises(ArgumentError, match="negative"):
        cache.crop(4)
    got = model(ids[:, 26:], attention_mask=mask, past_key_values=cache).logits
    cache.crop(-4)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 0, 3]))
    rows = torch.tensor([1, 0, 1])
    again = model(ids[rows, 26:], attention_mask=mask[rows], past_key_values=cache).logits
    assert_close(again, got[rows])


def test_a_model_of_text_and_images_has_the_layers_of_its_text(comm):
    config = transformers.Gemma3Config(
        text_config={"num_hidden_layers": 6}, attn_implementation={"text_config": "treeattn"}
    )
    config.text_config._attn_implementation = "treeattn"
    kv = huggingface.ShardedKV(config, comm, capacity=64)
    assert [kind for kind, sliding in enumerate(kv.is_sliding) if not sliding] == [5]


def test_a_cache_that_cannot_be(comm, model):
    refused("capacity must be a positive whole number", huggingface.ShardedKV, model.config, comm, capacity=0)
    if comm.size > 1:
        refused("capacity differs", huggingface.ShardedKV, model.config, comm, capacity=9 + comm.rank)
    kv = huggingface.ShardedKV(model.config, comm, capacity=64)
    with torch.no_grad():
        model(prompt(), past_key_values=kv)
    refused("a prefill comes first", huggingface.prefill, model, prompt(), kv)
    if comm.size > 1:
        kv.reset()
        refused("leave the prefill", huggingface.prefill, model, prompt()[:, :1], kv)
        refused("ids differs", huggingface.prefill, model, prompt(seed=comm.rank), kv)
        refused("ids differs", model.generate, prompt(seed=comm.rank), cache=kv)
        begins_elsewhere = padded(prompt(3)).roll(comm.rank, 0)
        refused("attention_mask differs", huggingface.prefill, model, prompt(3), kv, begins_elsewhere)


@pytest.mark.parametrize("family", ["Llama", "GPT-OSS"])
def test_ranks_with_different_prompts_and_nobody_who_asks(comm, family):
    """The first chunk of a sequence tells, and what comes after a reset; no later step does."""
    if comm.size == 1:
        pytest.skip("one rank has nobody to differ from")
    model, last = made(family, "treeattn"), comm.rank == comm.size - 1
    kv = huggingface.ShardedKV(model.config, comm, capacity=64)
    one_other = prompt()
    one_other[0, 13] = 2 + (one_other[0, 13] + 1 if last else one_other[0, 13]) % 90
    others = [prompt(seed=comm.rank), one_other, prompt(tokens=30 + last), prompt(2 if last else 1)]
    mask = padded(prompt(3)) if last else torch.ones(3, 30, dtype=torch.int64)
    for ids in others:
        refused("ranks were given different tokens", model, ids, past_key_values=kv)
        kv.reset()
    refused("different tokens", model, prompt(3), attention_mask=mask, past_key_values=kv)
    kv.reset()
    check_text(made(family), prompt(), lambda _: kv, max_new_tokens=4)


def test_processors_that_round_otherwise_are_no_other_prompt(comm, cache):
    model = made("Llama", "treeattn")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1 + 1e-6 * comm.rank)
        model(prompt(), past_key_values=cache)


def test_a_layer_that_was_left_waiting_is_named(cache):
    keys = torch.zeros(1, 2, 1, 16)
    cache.update(keys, keys, 0)
    with pytest.raises(StateError, match="did not attend to them"):
        cache.update(keys, keys, 1)
    cache.reset()
    cache.update(keys, keys, 0)


def test_a_cache_that_a_failed_call_left_half_filled(comm, monkeypatch, cache):
    """In the middle of a layer, or between two of them: what follows would be another text."""
    model = made("Llama", "treeattn")
    refused("output_attentions", model, prompt(), output_attentions=True, past_key_values=cache)
    refused("half filled", model, prompt(1, 1), past_key_values=cache)
    cache.reset()
    monkeypatch.setattr(model.model.layers[1].self_attn, "is_causal", False)
    refused("not causal", model, prompt(), past_key_values=cache)
    refused("half filled", model, prompt(1, 1), past_key_values=cache)
    cache.reset()
    monkeypatch.undo()
    with torch.no_grad():
        got = model(prompt(), past_key_values=cache).logits
    assert_close(got, made("Llama")(prompt()).logits)


def fail(*_):
    """A hook that raises what nothing else does."""
    raise ZeroDivisionError


def failing(model, number, ids, cache):
    """Call a model whose layer of this number fails."""
    hook = model.model.layers[number].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        model(ids, cache=cache)
    hook.remove()


def test_windows_that_a_failed_call_left_behind(comm):
    kinds = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
    model = made("Gemma 3", "treeattn", layer_types=kinds)
    cache = huggingface.ShardedKV(model.config, comm, capacity=64)
    with torch.no_grad():
        model(prompt(1, 20), cache=cache)
    failing(model, 2, prompt(1, 4), cache)
    refused("half filled", model, prompt(1, 3), cache=cache)


def test_latents_of_a_failed_call_are_not_those_of_the_next(comm, monkeypatch):
    """Which has another cache."""
    model, ids = made("DeepSeek-V3", "treeattn"), prompt(1, 3, seed=7)
    cache = huggingface.ShardedKV(model.config, comm, capacity=64)
    with torch.no_grad():
        model(prompt(1, 10), cache=cache)
        monkeypatch.setattr(model.model.layers[0].self_attn, "expand_kv", fail)
        with pytest.raises(ZeroDivisionError):
            model(prompt(1, 3), cache=cache)
        monkeypatch.undo()
        got = model(ids, cache=transformers.DynamicCache(config=model.config)).logits
    assert_close(got, made("DeepSeek-V3")(ids).logits)
    refused("half filled|attend to them", model, ids, cache=cache)


def test_a_batch_that_comes_back_after_one_that_failed(comm, folder):
    model = made("Llama", "treeattn")
    cache = huggingface.ShardedKV(model.config, comm, capacity=64)
    failing(model, 1, prompt(2, 8), cache)
    for rows in (3, 2):
        cache.reset()
        model.generate(prompt(rows, 8), cache=cache, max_new_tokens=2)
    cache.save(folder)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_rows_are_repeated_and_counted(comm, family):
    model, ids = made(family, "treeattn"), prompt(1, 12)
    cache = huggingface.ShardedKV(model.config, comm, capacity=64)
    cache.batch_repeat_interleave(3)  # of nothing
    with torch.no_grad():
        model(ids, cache=cache)
        cache.batch_repeat_interleave(3)
        refused("3 texts, these are 2", model, prompt(2, 1), cache=cache)


def test_keys_that_were_changed_on_the_way_are_noticed_at_once(model, cache):
    """By attention, which gets them without their layer. The next call is served."""
    attention = ALL_ATTENTION_FUNCTIONS["treeattn"]
    layer, query = model.model.layers[0].self_attn, torch.zeros(1, 4, 1, 16)
    keys, values = cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)
    refused("changed the keys on the way", attention, layer, query, keys * 2, values, None)
    assert attention(layer, query, torch.zeros(1, 2, 1, 16), values, None)[0].shape == (1, 1, 4, 16)


def test_more_threads_than_processors_are_told(comm, monkeypatch, model):
    """mpiexec leaves torch as many on each rank as there are processors."""
    if comm.size == 1:
        pytest.skip("one rank may have them all")
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    with pytest.warns(RuntimeWarning, match=f"6 threads on each of {comm.size} ranks .*{6 // comm.size}$"):
        huggingface.ShardedKV(model.config, comm, capacity=9)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})  # bound to their own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        huggingface.ShardedKV(model.config, comm, capacity=9)


def test_what_a_rank_has_whole_it_attends_to_alone(comm):
    """Under torchrun in a group of its own, in which no other has to take part."""
    plans._alone.cache_clear()
    if comm.rank == 0:
        made("Llama", "treeattn")(prompt(), use_cache=False)


def test_a_cache_of_another_model(comm, model):
    """Of one with windows, whose older tokens are gone, or with fewer layers."""
    windows = huggingface.ShardedKV(made("Mistral", "treeattn").config, comm, capacity=64)
    with torch.no_grad():
        got = model(prompt(1, 7), past_key_values=windows).logits  # of a short text nothing is gone
    assert_close(got, made("Llama")(prompt(1, 7)).logits)
    refused("a window of None, its cache has one of 7", model, prompt(), past_key_values=windows)
    mixed, full = made("Qwen3 with windows", "treeattn"), made("Qwen3", "treeattn")
    own = transformers.DynamicCache(config=mixed.config)
    full(prompt(), past_key_values=own)
    refused("hands over 7: make the cache", full, prompt(1, 1), past_key_values=own)
    longer, few = made("Llama", "treeattn", num_hidden_layers=5), huggingface.ShardedKV
    refused("more than the 4 layers", longer, prompt(), past_key_values=few(model.config, comm, capacity=64))


def test_a_text_that_the_cache_has_already(model, cache):
    """transformers would put its last token behind the others once more."""
    text = model.generate(prompt(), past_key_values=cache, max_new_tokens=3)
    for ids in (prompt(), text[:, :-1]):
        refused("the cache has 32 slots already", model.generate, ids, past_key_values=cache)
    model.generate(text, past_key_values=cache, max_new_tokens=1)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 3.0},
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "factor": 4.0,
            "original_max_position_embeddings": 28,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_frequencies_that_depend_on_the_length(comm, rope):
    """Of a prompt of 29 tokens not every rank has the last."""
    rope = {"rope_theta": 1e4, **rope}
    other = made("Llama", rope_parameters=rope, max_position_embeddings=28)
    wanted = other.generate(prompt(), do_sample=False, max_new_tokens=4).tolist()
    other.set_attn_implementation("treeattn")
    kv = huggingface.ShardedKV(other.config, comm, capacity=64)
    if comm.size > 1:
        refused("depend on the length", huggingface.prefill, other, prompt()[:, :29], kv)
    huggingface.prefill(other, prompt()[:, :27], kv)
    kv.reset()
    got = other.generate(prompt(), past_key_values=kv, do_sample=False, max_new_tokens=4)
    assert got.tolist() == wanted


def test_either_name_of_a_cache_is_taken_without_a_warning(model, cache, recwarn):
    """`past_key_values=` is deprecated: transformers would warn of it."""
    for name in "cache", "past_key_values":
        cache.reset()
        model.generate(prompt(), max_new_tokens=2, **{name: cache})
        assert cache.get_seq_length() == 31
    assert not [one for one in recwarn if issubclass(one.category, FutureWarning)]


def test_a_cache_is_not_copied(cache):
    refused("crop", copy.deepcopy, cache)
    refused("crop", pickle.dumps, cache)


def test_layers_whose_heads_differ_have_room_for_their_own_alone(comm, model):
    """And not for the layers of another width, too."""
    config = transformers.LlamaConfig(
        num_hidden_layers=3,
        num_attention_heads=2,
        head_dim=16,
        per_layer_config={1: {"head_dim": 32}},
        attn_implementation="treeattn",
    )
    kv = huggingface.ShardedKV(config, comm, capacity=64)
    attention = ALL_ATTENTION_FUNCTIONS["treeattn"]
    for number, width in enumerate((16, 32, 16)):
        q, k, v = (torch.zeros(1, 2, 4, width) for _ in range(3))
        attention(model.model.layers[0].self_attn, q, *kv.update(k, v, number), None)
    first, other, third = (layer.shard for layer in kv.layers)
    assert (first.layers, other.layers) == ((first, third), (other,))  # and none that nobody has taken


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_after_a_reset_keys_may_be_of_another_type(comm, model, cache, dtype):
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
        cache.reset()
        other = made("Llama", "treeattn", dtype)
        got = other(prompt(), past_key_values=cache).logits, other(prompt(1, 3), past_key_values=cache).logits
        fresh = huggingface.ShardedKV(model.config, comm, capacity=64)
        wanted = (
            other(prompt(), past_key_values=fresh).logits,
            other(prompt(1, 3), past_key_values=fresh).logits,
        )
    assert all(map(torch.equal, got, wanted))
