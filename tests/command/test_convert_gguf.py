"""``tools/convert_gguf.py``: a tiny model, written as GGUF here, is the model that it was."""

import contextlib
import io
import runpy
import sys
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI
from msgspec import structs
from safetensors.numpy import load_file, save_file
from tokenizers import pre_tokenizers

from tests.support.drawn import sample
from tests.support.models import write_model
from treeattn.llama import Llama, Session, read_config
from treeattn.llama import model as model_module
from treeattn.llama.tokenizer import Tokenizer

from .launch import ROOT, run

gguf = pytest.importorskip("gguf", reason="no gguf: pip install 'treeattn[models]'")

CONVERTER = ROOT / "tools" / "convert_gguf.py"
main = runpy.run_path(str(CONVERTER))["main"]
TYPES = gguf.GGMLQuantizationType
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
#: What single bytes are written as.
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def interleaved(rows, heads):
    """Rows of q or k as GGUF has them: those that are rotated against each other side by side."""
    d = len(rows) // heads
    order = np.arange(d).reshape(2, d // 2).T.ravel()
    return rows.reshape(heads, d, *rows.shape[1:])[:, order].reshape(rows.shape)


def tensors_of(directory):
    """Name of GGUF -> float32 values as GGUF has them."""
    config = read_config(directory)
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads}
    for file in sorted(directory.glob("*.safetensors")):
        for name, values in load_file(file).items():
            part = name.split(".")[-2]
            values = interleaved(values, heads[part]) if part in heads else values
            yield NAMES.get_name(name, (".weight", ".bias")), values


def write_gguf(path, directory, kind="F32", **changes):
    """changes: of the file's keys, None leaves one out; tensors: more of them."""
    config, writer = read_config(directory), gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    more = changes.pop("tensors", {})
    tokens = [*BYTES[: config.vocab_size - 2], "ab", "<end>"]
    values = {
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.heads,
        "llama.attention.head_count_kv": config.kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope.theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": config.vocab_size - 1,
    }
    for key, value in (values | changes).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, array in [*tensors_of(directory), *more.items()]:
        own = TYPES[kind] if array.ndim == 2 else TYPES.F32
        writer.add_tensor(name, gguf.quants.quantize(array, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(source, directory):
    with (
        mock.patch.object(sys, "argv", ["convert", source, directory]),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        main()
    assert said.getvalue().startswith(f"{directory}: ")
    return directory


def refused(source, directory):
    """What a program ends with, in one line on stderr."""
    with mock.patch.object(sys, "argv", ["convert", source, directory]), pytest.raises(SystemExit) as ended:
        main()
    assert "\n" not in str(ended.value)
    return str(ended.value)


def logits(directory, prompt=tuple(range(2, 40))):
    with Session(MPI.COMM_SELF, Llama(directory), prompt, capacity=len(prompt)) as session:
        return session.prefill()


@pytest.mark.parametrize("name", sample(2, ["default_rope", "biases", "tied", "wide_heads"]))
def test_a_model_comes_through_as_it_was(tmp_path, name):
    """Biases, heads that are wider than their share, and ends that are tied among them."""
    original = write_model(tmp_path / "original", name, rope_parameters=PLAIN)
    made = converted(write_gguf(tmp_path / "model.gguf", original), tmp_path / "made")
    wanted = {n: t for file in original.glob("*.safetensors") for n, t in load_file(file).items()}
    got = load_file(made / "model.safetensors")
    assert got.keys() == wanted.keys()
    for tensor, values in wanted.items():
        np.testing.assert_array_equal(got[tensor], values, err_msg=tensor)
    config = read_config(original)
    rounded = float(np.float32(config.rms_norm_eps))  # as GGUF holds it
    assert read_config(made) == structs.replace(config, rms_norm_eps=rounded)
    np.testing.assert_array_equal(logits(made), logits(original))


def test_rows_of_q_and_k_are_those_of_interleaved_positions(tmp_path, monkeypatch):
    """The rows as GGUF has them, rotated pair by pair side by side, make the same model."""
    original = write_model(tmp_path / "original", "default_rope")
    made = converted(write_gguf(tmp_path / "model.gguf", original), tmp_path / "made")
    wanted, path = logits(made), made / "model.safetensors"
    held = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    tensors = load_file(path)
    for name in tensors:
        if "q_proj" in name or "k_proj" in name:
            tensors[name] = held[NAMES.get_name(name, (".weight",))]
    save_file(tensors, path)

    def rotate(x, cosine, sine):
        first, second = x[..., ::2], x[..., 1::2]
        return np.stack([first * cosine - second * sine, second * cosine + first * sine], -1).reshape(x.shape)

    monkeypatch.setattr(model_module, "rotate", rotate)
    np.testing.assert_allclose(logits(made), wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
    monkeypatch.undo()
    assert np.abs(logits(made) - wanted).max() > 1e-2 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", sample(3, ["F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"]))
def test_values_of_fewer_bits_are_what_they_stand_for(tmp_path, kind):
    """As the gguf package reads them, and in the model's order; norms are kept as they are."""
    original = write_model(tmp_path / "original", "tied", rope_parameters=PLAIN)
    made = converted(write_gguf(tmp_path / "model.gguf", original, kind), tmp_path / "made")
    wanted = {n: t for file in original.glob("*.safetensors") for n, t in load_file(file).items()}
    for name, got in load_file(made / "model.safetensors").items():
        assert got.dtype == np.float32
        exact = wanted[name] if got.ndim == 1 else gguf.quants.quantize(wanted[name], TYPES[kind])
        np.testing.assert_array_equal(got, exact if got.ndim == 1 else gguf.dequantize(exact, TYPES[kind]))


def test_text_is_split_into_the_files_tokens(tmp_path):
    original = write_model(tmp_path / "original", "tied", rope_parameters=PLAIN)
    made = Tokenizer(converted(write_gguf(tmp_path / "model.gguf", original), tmp_path / "made"), 256)
    numbers = made.encode("abba 42<end>")
    letters = [BYTES.index(one) for one in "b"], [BYTES.index(one) for one in "42"]
    assert numbers == [254, *letters[0], BYTES.index("a"), BYTES.index("\u0120"), *letters[1], 255]
    assert made.decode(numbers[:-1]) == "abba 42"


STRANGE = np.ones((4, 96), np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen2"}, "model.gguf: is a 'qwen2', only llama is served"),
        ({"llama.rope.scaling.type": "linear"}, "scales its rotary positions"),
        ({"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, "scales its rotary positions"),
        ({"tokenizer.ggml.model": "llama"}, "its tokenizer is no byte-level BPE"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "splits words as 'llama-bpe', only gpt-2 and smollm are"),
        ({"tokenizer.ggml.add_bos_token": True}, "puts a token before each text"),
        ({"tokenizer.ggml.eos_token_id": None}, "the file does not say tokenizer.ggml.eos_token_id"),
        ({"llama.context_length": None}, "the file does not say llama.context_length"),
        ({"tensors": {"blk.0.attn_qkv.weight": STRANGE}}, "has a tensor 'blk.0.attn_qkv.weight'"),
    ],
)  # fmt: skip
def test_what_is_not_carried_over_is_refused(tmp_path, changes, message):
    original = write_model(tmp_path / "original", "tied", rope_parameters=PLAIN)
    assert message in refused(write_gguf(tmp_path / "model.gguf", original, **changes), tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_files_that_are_none(tmp_path):
    assert "usage: " in run(CONVERTER, tmp_path / "model.gguf", code=1).stderr
    assert "model.gguf: no such file" in refused(tmp_path / "model.gguf", tmp_path / "made")
    original = write_model(tmp_path / "original", "tied", rope_parameters=PLAIN)
    whole = write_gguf(tmp_path / "model.gguf", original).read_bytes()
    for part in (b"", b"GGU", b"some text that is no model", whole[:500], whole[:-5000]):
        (tmp_path / "torn.gguf").write_bytes(part)
        said = refused(tmp_path / "torn.gguf", tmp_path / "made")
        assert "torn.gguf: is not a whole GGUF file (" in said
