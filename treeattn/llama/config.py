"""Reads a model's configuration: ``config.json`` in both dialects, and ``generation_config.json``.

Transformers 5 writes ``rope_parameters``; published Llama 3 files have ``rope_theta`` and ``rope_scaling``.
What would give other logits than transformers has is refused by its name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeattn.attention.shape import Shape
from treeattn.errors import ArgumentError

_ARCHITECTURE = "LlamaForCausalLM"


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding; kind: default, linear or llama3, whose factors stretch long waves."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class Config:
    """The shape of a Llama; eos: the tokens that end a text."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    eos: tuple[int, ...]
    rope: Rope


#: What a field's value must be: the test, and its words.
_WHOLE = (lambda value: type(value) is int and value >= 1, "a positive whole number")
_NUMBER = (lambda value: type(value) in (int, float) and 0 < value < 1e30, "a number above 0")
_FLAG = (lambda value: type(value) is bool, "true or false")
_TOKENS = (
    lambda value: all(type(token) is int and token >= 0 for token in _listed(value)),
    "a token or a list of them",
)


class _Fields(dict[str, Any]):
    """A JSON object whose errors name file and field."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        super().__init__(values)
        self.path, self.prefix = path, prefix

    def refuse(self, name: str, why: str) -> ArgumentError:
        return ArgumentError(f"{self.path}: {self.prefix}{name} {why}")

    def take(self, name: str, wanted: tuple[Any, str], default: Any = None) -> Any:
        value = default if self.get(name) is None else self[name]
        if not wanted[0](value):
            raise self.refuse(name, f"must be {wanted[1]}, not {value!r:.40}")
        return value


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def read_config(directory: str | Path) -> Config:
    """The configuration of the model in a directory; an `ArgumentError` names file and field."""
    path = Path(directory) / "config.json"
    fields = _read(path)
    _check_architecture(fields)
    hidden, heads = fields.take("hidden_size", _WHOLE), fields.take("num_attention_heads", _WHOLE)
    config = Config(
        hidden_size=hidden,
        intermediate_size=fields.take("intermediate_size", _WHOLE),
        layers=fields.take("num_hidden_layers", _WHOLE),
        heads=heads,
        kv_heads=fields.take("num_key_value_heads", _WHOLE, heads),
        head_dim=fields.take("head_dim", _WHOLE, hidden // heads),
        vocab_size=fields.take("vocab_size", _WHOLE),
        rms_norm_eps=float(fields.take("rms_norm_eps", _NUMBER, 1e-6)),
        max_position_embeddings=fields.take("max_position_embeddings", _WHOLE, 2048),
        tied=fields.take("tie_word_embeddings", _FLAG, False),
        attention_bias=fields.take("attention_bias", _FLAG, False),
        mlp_bias=fields.take("mlp_bias", _FLAG, False),
        eos=_eos(path.with_name("generation_config.json"), fields),
        rope=_rope(fields),
    )
    if config.heads % config.kv_heads:
        raise fields.refuse("num_key_value_heads", f"{config.kv_heads} does not divide {config.heads} heads")
    try:
        Shape(1, 1, config.heads, config.kv_heads, config.head_dim, "float32")
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None
    return config


def _read(path: Path) -> _Fields:
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read ({error.strerror}): name a model directory") from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path}: is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ArgumentError(f"{path}: is not a JSON object")
    return _Fields(path, values)


def _check_architecture(fields: _Fields) -> None:
    found = fields.get("architectures")
    if not isinstance(found, list) or found[:1] != [_ARCHITECTURE]:
        raise fields.refuse("architectures", f"is {found!r:.60}: only {_ARCHITECTURE} is served")
    for name, served in (("model_type", "llama"), ("hidden_act", "silu")):
        if fields.get(name, served) != served:
            raise fields.refuse(name, f"is {fields[name]!r:.40}: only {served} is served")
    if fields.get("quantization_config"):
        raise fields.refuse("quantization_config", "is there: quantised weights are not served")
    # As transformers reads it: layer_types, or without them a window or a chunk that all layers have.
    types = fields.get("layer_types")
    full = isinstance(types, list) and all(kind == "full_attention" for kind in types)
    for name in ("sliding_window", "attention_chunk_size") if types is None else ("layer_types",):
        if fields.get(name) is not None and not full:
            raise fields.refuse(name, f"is {fields[name]!r:.60}: only full attention is served")


def _eos(path: Path, fields: _Fields) -> tuple[int, ...]:
    """The tokens of generation_config.json, which win over those of config.json."""
    stated = _read(path) if path.exists() else fields
    stated = fields if stated.get("eos_token_id") is None else stated
    return tuple(_listed(stated.take("eos_token_id", _TOKENS, [])))


def _rope(fields: _Fields) -> Rope:
    """As transformers 5: rope_scaling goes first, and what it lacks is a field of the configuration
    itself."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    stated = fields.get(name) or {}
    if not isinstance(stated, dict):
        raise fields.refuse(name, f"must be an object, not {stated!r:.40}")
    beside = {key: fields.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    rope = _Fields(fields.path, beside | stated, f"{name}.")
    for key, value in stated.items():
        if isinstance(value, dict):
            raise rope.refuse(key, "is an object: one rope for all layers is served")
    kind = stated.get("rope_type", stated.get("type", "default"))
    theta = float(rope.take("rope_theta", _NUMBER, 10000.0))
    if kind == "default":
        return Rope(kind, theta)
    if kind not in ("linear", "llama3"):
        raise rope.refuse("rope_type", f"{kind!r:.40} is not served: default, linear and llama3 are")
    if (part := rope.take("partial_rotary_factor", _NUMBER, 1.0)) != 1:  # which default leaves out
        raise rope.refuse("partial_rotary_factor", f"is {part}: rope_type {kind} rotates whole heads")
    if kind == "linear":
        return Rope(kind, theta, float(rope.take("factor", _NUMBER)))
    factor, low, high = (
        float(rope.take(f"{part}factor", _NUMBER)) for part in ("", "low_freq_", "high_freq_")
    )
    if low >= high:
        raise rope.refuse("low_freq_factor", f"{low} must be below high_freq_factor, {high}")
    return Rope(kind, theta, factor, low, high, rope.take("original_max_position_embeddings", _WHOLE))
