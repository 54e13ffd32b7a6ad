"""Tiny Llamas, written as their directories: whatever the configuration says matters to their logits.

Weights of deviation 0.12, perturbed norms and biases that are not 0: with the small random weights that
models are initialised with, most wrong models give the right tokens. `tests/golden/llama/regenerate.py`
asked Hugging Face for their logits.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from treeattn.llama.config import read_config
from treeattn.llama.weights import shapes

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 255,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_parameters": LLAMA3,
}
#: Name -> what differs from `BASE`; None leaves an entry out.
MODELS: dict[str, dict[str, Any]] = {
    "grouped_llama3": {},
    "tied": {"tie_word_embeddings": True},
    "one_kv_head": {"num_key_value_heads": 1},
    "kv_head_each": {"num_key_value_heads": 6},
    "wide_heads": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "default_rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "eos_list": {"eos_token_id": [253, 254, 255], "rms_norm_eps": 1e-6},
    "old_dialect": {
        "rope_parameters": None,
        "rope_theta": 500000.0,
        "rope_scaling": {name: value for name, value in LLAMA3.items() if name != "rope_theta"},
    },
}
#: The prompt of all of them: longer than the context before its positions are stretched.
PROMPT = np.random.default_rng(7).integers(0, 253, 301)


#: What Hugging Face says of them.
GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "llama" / "logits.npz")


def assert_logits(got: Any, wanted: Any) -> None:
    assert type(got) is np.ndarray
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


def write_model(directory: Path, name: str, dtype: Any = np.float32, **changes: Any) -> Path:
    """A model directory of two files of weights of this type and an index."""
    directory.mkdir(parents=True, exist_ok=True)
    values = BASE | MODELS[name] | changes
    config = {field: value for field, value in values.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    rng, tensors = np.random.default_rng(sorted(MODELS).index(name)), {}
    for tensor, shape in shapes(read_config(directory)).items():
        drawn = rng.standard_normal(shape).astype(np.float32)
        deviation = 0.3 if "norm" in tensor else 0.1 if tensor.endswith("bias") else 0.12
        tensors[tensor] = drawn * np.float32(deviation) + np.float32("norm" in tensor)
    names = list(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file(
            {tensor: tensors[tensor].astype(dtype) for tensor in held}, directory / file, {"format": "pt"}
        )
    placed = {tensor: file for file, held in halves.items() for tensor in held}
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": placed})
    )
    return directory
