"""A saved cache is continued by the text and the weights it was made of, and by no others."""

import pytest
import torch
import transformers

from tests.support.tiny_models import made, padded, prompt
from treeattn import huggingface
from treeattn.errors import ArgumentError, StateError
from treeattn.huggingface import plans
from treeattn.huggingface.origin import Origin, weights_digest

GREEDY = {"do_sample": False, "max_new_tokens": 4}


@pytest.fixture
def directory(comm, folder):
    """The cache of the prompt but its last token."""
    model = made("Llama", "treeattn")
    kv = huggingface.ShardedKV(model.config, comm, capacity=64)
    huggingface.prefill(model, prompt(2)[:, :-1], kv, padded(prompt(2))[:, :-1])
    kv.save(folder)
    comm.barrier()
    return folder


@pytest.fixture
def loaded(comm, directory):
    def load(model, **how):
        kv = huggingface.ShardedKV(model.config, comm, capacity=64)
        kv.load(directory, **how)
        return kv

    return load


class Adapted(torch.nn.Module):
    """A LoRA of one layer, as PEFT names its parts; `active_adapters` switches it."""

    def __init__(self, base_layer, rank=2, scale=1.0):
        super().__init__()
        self.base_layer, self.active_adapters, self.scaling = base_layer, ["default"], {"default": scale}
        self.lora_A = torch.nn.Parameter(torch.full((rank, base_layer.in_features), 0.1))
        self.lora_B = torch.nn.Parameter(torch.full((base_layer.out_features, rank), 0.1))

    def forward(self, states):
        out = self.base_layer(states)
        if self.active_adapters:
            out = out + states @ self.lora_A.T @ self.lora_B.T * self.scaling["default"]
        return out


def adapted(model):
    attention = model.model.layers[2].self_attn
    attention.v_proj = Adapted(attention.v_proj)


def merged(model):
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight += 1e-3


def drawn_anew(model):
    torch.manual_seed(9)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)


@pytest.mark.parametrize("changed", [adapted, merged, drawn_anew, torch.nn.Module.double])
def test_other_weights_of_the_same_shape(loaded, changed):
    model = made("Llama", "treeattn")
    changed(model)
    kv = loaded(model)
    with pytest.raises(ArgumentError, match="saved by other weights"):
        model.generate(prompt(2), attention_mask=padded(prompt(2)), past_key_values=kv, **GREEDY)


def test_an_adapter_that_is_switched(comm, folder):
    """Its weights are there before and after."""
    model = made("Llama", "treeattn")
    adapted(model)
    kv = huggingface.ShardedKV(model.config, comm, capacity=64)
    text = model.generate(prompt(), past_key_values=kv, **GREEDY)
    kv.save(folder)
    for name, other in ("active_adapters", []), ("scaling", {"default": 2.0}):
        kv = huggingface.ShardedKV(model.config, comm, capacity=64)
        kv.load(folder)
        layer = model.model.layers[2].self_attn.v_proj
        before = getattr(layer, name)
        setattr(layer, name, other)
        with pytest.raises(ArgumentError, match="other weights, adapters or types"):
            model.generate(text, past_key_values=kv, **GREEDY)
        setattr(layer, name, before)
    model.generate(text, past_key_values=kv, **GREEDY)


def test_another_configuration(loaded):
    theta = made("Llama", "treeattn", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    with pytest.raises(ArgumentError, match="another configuration"):
        loaded(theta)
    assert loaded(theta, unchecked=True).get_seq_length() == 29


def test_another_text(loaded):
    """Other ids, other padding, none of them; with those it was made of it goes on."""
    model, ids, mask = made("Llama", "treeattn"), prompt(2), padded(prompt(2))
    wanted = made("Llama").generate(ids, attention_mask=mask, **GREEDY).tolist()
    kv, other = loaded(model), ids.clone()
    other[1, 17] += 1
    for given in other, ids.flip(0):
        with pytest.raises(ArgumentError, match="saved of another text"):
            model.generate(given, past_key_values=kv, attention_mask=mask, **GREEDY)
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(ArgumentError, match="ids of the text .inputs_embeds.* cannot be compared"):
        model.generate(inputs_embeds=embeds, attention_mask=mask, past_key_values=kv, **GREEDY)
    with pytest.raises(ArgumentError, match="saved of another text: pass ids and padding"):
        model.generate(ids, past_key_values=kv, attention_mask=torch.ones_like(ids), **GREEDY)
    got = model.generate(ids, past_key_values=kv, attention_mask=mask, **GREEDY)  # it is as it was
    assert got.tolist() == wanted
    for pads in (ids, ids.masked_fill(mask == 0, 5)):  # what stands under padding is no text
        kv = loaded(model)
        got = model.generate(pads, attention_mask=mask, past_key_values=kv, **GREEDY)
        assert got[:, 30:].tolist() == [row[30:] for row in wanted]


def test_nothing_else_goes_on_before_it_is_compared(loaded):
    model, ids = made("Llama", "treeattn"), prompt(2)
    kv, mask = loaded(model), padded(prompt(2))
    for call in lambda: model(ids[:, -1:], past_key_values=kv), lambda: kv.crop(-1):
        with pytest.raises(StateError, match=r"not compared yet: generate.. does so first"):
            call()
    unchecked = loaded(model, unchecked=True)
    got = model.generate(ids, attention_mask=mask, past_key_values=unchecked, **GREEDY)
    kv.batch_select_indices(torch.tensor([1, 0]))
    kv.batch_repeat_interleave(2)
    rows = [1, 1, 0, 0]
    again = model.generate(ids[rows], attention_mask=mask[rows], past_key_values=kv, **GREEDY)
    assert again.tolist() == got[rows].tolist()


WAYS = {
    "beams": {"num_beams": 3},
    "prompt lookup in chunks": {"prompt_lookup_num_tokens": 4, "prefill_chunk_size": 7},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_generate_has_written_is_known(comm, folder, way):
    """The rows of beams as they were reordered last, and drafts that were cropped."""
    model, ids = made("Llama", "treeattn"), prompt(1, 24)
    ids[:, 12:] = ids[:, :12]
    kv = huggingface.ShardedKV(model.config, comm, capacity=64)
    text = model.generate(ids, past_key_values=kv, **(GREEDY | WAYS[way]))
    kv.save(folder)
    slots, known = kv.get_seq_length(), kv.origin.text(kv.get_seq_length())
    assert slots == 27
    with torch.no_grad():
        fresh = huggingface.ShardedKV(model.config, comm, capacity=64)
        model(known, past_key_values=fresh)
    held, wanted = (layer.shard.k for layer in (kv.layers[3], fresh.layers[3]))
    mine = int(fresh.layers[3].shard.lengths[0])
    torch.testing.assert_close(held[:, :mine], wanted[:, :mine], rtol=1e-3, atol=1e-4)
    again = huggingface.ShardedKV(model.config, comm, capacity=64)
    again.load(folder)
    more = torch.cat([known, prompt(len(known), 3, seed=5)], 1)
    got = model.generate(more, past_key_values=again, **GREEDY)
    assert got.tolist() == made("Llama").generate(more, **GREEDY).tolist()
    assert known[0, :24].tolist() == text[0, :24].tolist()


def test_a_text_that_is_not_known_is_saved_unchecked_alone(comm, folder):
    model, ids = made("Llama", "treeattn"), prompt()
    kv = huggingface.ShardedKV(model.config, comm, capacity=64)

    def embedded():
        embeds = model.get_input_embeddings()(ids).detach()
        model.generate(inputs_embeds=embeds, past_key_values=kv, **GREEDY)

    def own_loop():
        model(ids, past_key_values=kv)

    def behind_a_crop():
        huggingface.prefill(model, ids, kv)
        kv.crop(-10)
        model(ids[:, :4], past_key_values=kv)

    def by_two_models():
        other = made("Llama", "treeattn")
        for one in model, other:  # whose weight is there as its parts
            torch.nn.utils.parametrizations.weight_norm(one.model.layers[2].self_attn.v_proj)
        huggingface.prefill(model, ids[:, :9], kv)
        merged(other)
        other.generate(ids, past_key_values=kv, **GREEDY)

    for way, what in (embedded, "ids"), (own_loop, "ids"), (behind_a_crop, "ids"), (by_two_models, "weights"):
        kv.reset()
        with torch.no_grad():
            way()
        with pytest.raises(ArgumentError, match=f"the {what} that the cache was made by are not known"):
            kv.save(folder)
    kv.save(folder, unchecked=True)
    slots, again = kv.get_seq_length(), huggingface.ShardedKV(model.config, comm, capacity=64)
    with pytest.raises(ArgumentError, match="does not say of which ids"):
        again.load(folder)
    again.load(folder, unchecked=True)
    assert again.get_seq_length() == slots


def test_a_second_turn_of_another_text(comm):
    """Also without files: what the cache has of ids is known."""
    model, ids = made("Llama", "treeattn"), prompt()
    kv = huggingface.ShardedKV(model.config, comm, capacity=64)
    text = model.generate(ids, past_key_values=kv, **GREEDY)
    other = text.clone()
    other[0, 7] = 2 + (other[0, 7] - 1) % 95
    with pytest.raises(ArgumentError, match="another text, from slot 7 of row 0 on"):
        model.generate(other, past_key_values=kv, **GREEDY)
    kv.crop(-(kv.get_seq_length() - 7))
    got = model.generate(other, past_key_values=kv, **GREEDY)
    assert got.tolist() == made("Llama").generate(other, **GREEDY).tolist()


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_a_second_turn_of_another_padding(comm, family):
    """It is refused before the cache changes, also where every layer has a window."""
    model, ids, mask = made(family, "treeattn"), prompt(2, 12), padded(prompt(2, 12))
    kv = huggingface.ShardedKV(model.config, comm, capacity=64)
    text = model.generate(ids, attention_mask=mask, cache=kv, **GREEDY)
    longer = torch.cat([text, prompt(2, 2, seed=6)], 1)
    mask = torch.cat([mask, torch.ones_like(longer[:, 12:])], 1)
    with pytest.raises(ArgumentError, match="another text, from slot 0 of row 1 on: pass ids and padding"):
        model.generate(longer, attention_mask=torch.ones_like(longer), cache=kv, **GREEDY)
    got = model.generate(longer, attention_mask=mask, cache=kv, **GREEDY)
    assert got.tolist() == made(family).generate(longer, attention_mask=mask, **GREEDY).tolist()
    kv.reset()
    with torch.no_grad():
        model(ids, attention_mask=mask[:, :12], cache=kv)  # of ids that are not known then
    with pytest.raises(ArgumentError, match="rows of the cache begin at slots"):
        model.generate(longer, attention_mask=torch.ones_like(longer), cache=kv, **GREEDY)


def test_what_a_configuration_leaves_open_the_models_own_says(comm):
    model, ids = made("Llama", "treeattn"), prompt(1, 10)
    kv = huggingface.ShardedKV(model.config, comm, capacity=64)
    given = {"generation_config": transformers.GenerationConfig(max_new_tokens=4), "cache": kv}
    model.generation_config.use_cache = False
    with pytest.raises(ArgumentError, match="use_cache=False"):
        model.generate(ids, **given)
    model.generation_config.use_cache = None
    model.generation_config.num_beams = model.generation_config.num_return_sequences = 3
    model.generate(ids, **given)
    kv.crop(10 - kv.get_seq_length())
    assert model.generate(torch.cat([ids, prompt(1, 3, seed=5)], 1), **given).shape == (3, 17)


def test_weights_that_differ_between_ranks(comm, folder):
    """As tensor parallel ones do: each rank compares its own, and another number of ranks cannot."""
    if comm.size == 1:
        pytest.skip("one rank has nobody to differ from")
    model, ids = made("Llama", "treeattn"), prompt()
    with torch.no_grad():
        model.lm_head.weight *= 1 + comm.rank
    kv = huggingface.ShardedKV(model.config, comm, capacity=64)
    with pytest.raises(ArgumentError, match="weights differs between ranks"):  # whose keys it would mix
        huggingface.prefill(model, ids, kv)
    text = model.generate(ids, past_key_values=kv, **GREEDY)
    kv.save(folder)
    comm.barrier()
    kv.reset()
    kv.load(folder)
    model.generate(text, past_key_values=kv, **GREEDY)
    alone = huggingface.ShardedKV(model.config, plans.alone().comm, capacity=64)
    alone.load(folder)
    with pytest.raises(ArgumentError, match="split over ranks in another way"):
        model.generate(text, past_key_values=alone, **GREEDY)


def test_a_step_of_ones_own_within_generate_is_compared(comm):
    """Of another processor, say: its ids and its padding are not those that generate() prepared."""
    model = made("Llama", "treeattn")
    kv, ids = huggingface.ShardedKV(model.config, comm, capacity=64), prompt()

    def other_ids(ids, scores):
        if ids.shape[1] == 32:
            model(ids[:, -1:] * 0 + 5 + comm.rank, cache=kv)
        return scores

    def other_padding(ids, scores):
        if ids.shape[1] == 32:
            model(ids[:, -1:], cache=kv, attention_mask=(torch.arange(33) != 3).long()[None])
        return scores

    for processor in (other_ids, other_padding)[int(comm.size == 1) :]:
        kv.reset()
        with pytest.raises(ArgumentError, match="different tokens|zero inside"):
            model.generate(ids, cache=kv, logits_processor=[processor], **GREEDY)


def test_weights_are_compared_beyond_their_first_column():
    model = made("Llama", "treeattn", hidden_size=64)
    before = weights_digest(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[:, 1:] *= 1.5
    assert weights_digest(model) != before


def test_padding_of_a_window_that_nobody_told_from_the_beginning():
    """As after a prompt by a compiled model: it stays unknown."""
    origin = Origin()
    origin.check_padding(None, 17, 1, gone=5)
    assert origin.known_begins(18) is None


def test_a_text_that_one_rank_has_shorter_is_refused_on_all(comm):
    model = made("Llama", "treeattn")
    kv = huggingface.ShardedKV(model.config, comm, capacity=64)
    longer = model.generate(prompt(), cache=kv, **GREEDY)
    with pytest.raises(ArgumentError, match="slots already"):
        model.generate(longer[:, : 20 if comm.rank == comm.size - 1 else 34], cache=kv, **GREEDY)
    comm.barrier()
