"""One process: whatever the configuration says shows in the logits; what is wrong with a model is named."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from safetensors.numpy import load_file, save_file

from tests.support.models import LLAMA3, PROMPT, write_model
from treeattn.errors import ArgumentError
from treeattn.llama import Llama, Session, read_config
from treeattn.llama.drafts import NgramDrafts, draft_tree

GOLDEN = np.load(Path(__file__).parents[2] / "golden" / "llama" / "logits.npz")


def test_mapped_matrices_give_the_same_bits(tmp_path):
    """They are the file's pages; others are copies, one behind the other."""
    path = write_model(tmp_path, "tied", dtype=np.float16)
    models = [Llama(path, mapped=mapped) for mapped in (True, False)]
    logits = []
    for model in models:
        with Session(MPI.COMM_SELF, model, PROMPT[:9], capacity=10) as session:
            logits.append([session.prefill(), session.step(3)])
    assert np.array_equal(*logits)
    assert [model.weight_bytes for model in models] == [models[0].weight_bytes] * 2
    mapped, placed = (model._embedding.weight for model in models)
    assert not mapped.flags.writeable
    assert placed.flags.writeable
    assert placed.ctypes.data % 64 == 0


def error_of(name, path):
    wanted = GOLDEN[f"{name}.logits"][0]
    with Session(MPI.COMM_SELF, Llama(path), PROMPT, capacity=len(PROMPT)) as session:
        return np.abs(session.prefill() - wanted).max() / np.abs(wanted).max()


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-6},
        {"rope_parameters": LLAMA3 | {"rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_parameters": LLAMA3 | {"factor": 4.0}},
        {"rope_parameters": LLAMA3 | {"high_freq_factor": 2.0}},
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 128}},
    ],
)
def test_a_wrong_configuration_is_caught_by_the_logits(tmp_path, changes):
    """So that equal logits mean an equal model: what is allowed is 1e-4."""
    assert error_of("grouped_llama3", write_model(tmp_path / "right", "grouped_llama3")) < 1e-5
    assert error_of("grouped_llama3", write_model(tmp_path / "wrong", "grouped_llama3", **changes)) > 2e-4


def test_generation_config_decides_what_ends_a_text(tmp_path):
    write_model(tmp_path, "eos_list")
    assert read_config(tmp_path).eos == (253, 254, 255)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert read_config(tmp_path).eos == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ArgumentError, match=r"generation_config.json: eos_token_id must be .*, not 'x'$"):
        read_config(tmp_path)


def test_what_a_kind_of_rope_does_not_state_is_not_looked_at(tmp_path):
    write_model(tmp_path, "grouped_llama3", rope_parameters={"rope_type": "default", "factor": -1})
    assert read_config(tmp_path).rope.factor == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn"}}, "config.json: rope_parameters.rope_type 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope_scaling.rope_type 'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}},
         "rope_parameters.full_attention is an object: one rope for all layers is served"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing, which"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling: Expected `float` > 0.0 - at"),
        ({"rope_scaling": {"type": None, "factor": 2}}, "rope_scaling.rope_type None is not served"),
        ({"hidden_size": "96"}, "config.json: Expected `int`, got `str` - at `$.hidden_size`"),
        ({"architectures": ["MistralForCausalLM"]}, "only LlamaForCausalLM is served"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4 does not divide 6 heads"),
        ({"architectures": 5}, "config.json: architectures is 5: only LlamaForCausalLM"),
        ({"model_type": "qwen2"}, "config.json: model_type is 'qwen2': only llama is served"),
        ({"rope_parameters": "linear"}, "config.json: rope_parameters must be an object, not 'linear'"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4}}, "low_freq_factor of rope_type llama3 must"),
        ({"head_dim": 15}, "config.json: head_dim 15 is not supported: use a multiple of 8"),
        ({"sliding_window": 16}, "config.json: sliding_window is 16: only full attention is served"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
         "config.json: layer_types is ['full_attention', 'sliding_attention'"),
        ({"partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor is 0.5: llama3"),
        ({"rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.5}},
         "config.json: rope_parameters.partial_rotary_factor is 0.5: llama3 rotates whole heads"),
    ],
)  # fmt: skip
def test_a_configuration_that_is_not_served(tmp_path, changes, message):
    write_model(tmp_path, "grouped_llama3")
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArgumentError, match=re.escape(message)):
        read_config(tmp_path)


def test_a_directory_without_a_model(tmp_path):
    with pytest.raises(ArgumentError, match=r"config\.json: cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ArgumentError, match=r"config\.json: is not JSON"):
        read_config(tmp_path)


EMBEDDING, INDEX = "model.embed_tokens.weight", "model.safetensors.index.json"


def replaced(path, change):
    """One tensor of a file made another."""
    file = path / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    save_file(change(tensors), file)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda path: (path / "model-00002-of-00002.safetensors").unlink(), "00002.*no such file"),
        (lambda path: replaced(path, lambda t: t | {EMBEDDING: np.zeros((2, 96), np.float32)}),
         r"00001-of-00002.*: model.embed_tokens.weight has shape \[2, 96\], config.json makes it \[256"),
        (lambda path: replaced(path, lambda t: {n: a.astype(np.int32) for n, a in t.items()}), "is int32: w"),
        (lambda path: replaced(path, lambda t: {n: a.astype(bool) for n, a in t.items()}), "is bool: w"),
        (lambda path: (path / INDEX).write_text((path / INDEX).read_text().replace("01-of", "02-of")),
         "00002-of-00002.safetensors: has no tensor .*, which model.safetensors.index.json places there$"),
        (lambda path: (path / INDEX).write_text('{"weight_map": []}'), "is not an index"),
        (lambda path: (path / INDEX).write_text('{"weight_map": {}}'), "has no tensor"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_named(tmp_path, broken, message):
    path = write_model(tmp_path, "grouped_llama3")
    broken(path)
    with pytest.raises(ArgumentError, match=message):
        Llama(path)


@pytest.fixture
def tensors(tmp_path):
    """Of the model whose ends are tied, which lies in `tmp_path`, of all files together."""
    write_model(tmp_path, "tied")
    return {n: t for file in tmp_path.glob("*.safetensors") for n, t in load_file(file).items()}


@pytest.mark.parametrize("comm", [None, MPI.COMM_SELF])
def test_tensors_that_the_configuration_does_not_have_are_left_alone(tmp_path, tensors, comm):
    """As Hugging Face does: the biases of a map that has none, the same head again where ends are tied."""
    wanted = GOLDEN["tied.logits"][0]
    more = {f"{name.removesuffix('weight')}bias": t[:, 0] for name, t in tensors.items() if "proj" in name}
    assert len(more) == 21
    (tmp_path / INDEX).unlink()
    save_file(tensors | more | {"lm_head.weight": tensors[EMBEDDING]}, tmp_path / "model.safetensors")
    with Session(MPI.COMM_SELF, Llama(tmp_path, comm), PROMPT, capacity=len(PROMPT)) as session:
        np.testing.assert_allclose(session.prefill(), wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("comm", [None, MPI.COMM_SELF])
def test_a_tied_model_with_a_head_of_its_own_is_refused(tmp_path, tensors, comm):
    """Hugging Face takes the head of the file then, whatever the configuration says."""
    (tmp_path / INDEX).unlink()
    save_file(tensors | {"lm_head.weight": tensors[EMBEDDING] * 2}, tmp_path / "model.safetensors")
    with pytest.raises(ArgumentError, match="model.safetensors: lm_head.weight is not .*tie_word_embeddings"):
        Llama(tmp_path, comm)


def test_a_file_of_everything_goes_before_an_index(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    for file in tmp_path.glob("model-*.safetensors"):
        save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file)
    assert error_of("tied", tmp_path) < 1e-5
    (tmp_path / "model.safetensors").unlink()
    assert error_of("tied", tmp_path) > 1e-2


def test_what_followed_the_longest_words_is_proposed():
    assert NgramDrafts()([1, 2, 3, 9, 8, 7, 5, 3, 1, 1, 2, 3], 4, 4) == [[9, 8, 7, 5]]
    assert NgramDrafts()([1, 2, 3, 9, 8, 7, 5, 3, 1, 1, 2, 3], 4, 2) == [[9, 8]]
    assert NgramDrafts()([4, 3, 1, 1, 2, 3], 4, 4) == [[1, 1, 2, 3]]
    assert NgramDrafts()([1, 2, 3], 4, 4) == []


def test_two_places_that_differ_share_the_budget():
    text = [5, 1, 8, 5, 2, 6, 5, 2, 6, 5]
    assert NgramDrafts()(text, 4, 9) == [[2, 6, 5]]  # by three tokens there is one
    assert NgramDrafts(longest=1)(text, 4, 9) == [[2, 6], [1, 8]]
    assert NgramDrafts(longest=1)(text, 1, 9) == [[2]]


def test_a_tree_has_the_last_token_as_its_root():
    tree = draft_tree(7, [[1, 2], [1, 3]], 6)
    assert (tree.nodes, tree.lengths.tolist()) == (6, [4])
    assert tree.tokens[0, :4].tolist() == [7, 1, 2, 3]
    assert tree.parents[0, :4].tolist() == [-1, 0, 1, 1]
