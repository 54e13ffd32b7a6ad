"""What a model directory says of itself: ``config.json`` in both dialects, and ``generation_config.json``.

Transformers 5 writes ``rope_parameters``; published Llama 3 files have ``rope_theta`` and ``rope_scaling``.
Both are read; a rope type that is not known is refused, since ignoring one changes every logit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeattn.attention.shape import Shape
from treeattn.errors import ArgumentError

__all__ = ["Config", "Rope", "read_config"]

_ARCHITECTURES = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. kind: default, linear or llama3; the factors are those of Llama 3.1's long
    contexts."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class Config:
    """The shape of a Llama. eos: the tokens that end a text."""

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

    @property
    def kv_bytes_per_token(self) -> int:
        """Of keys and values in float32, all layers."""
        return 2 * 4 * self.layers * self.kv_heads * self.head_dim


class _Fields:
    """Typed reads of a JSON object; an error names file and field."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def refuse(self, name: str, why: str) -> ArgumentError:
        return ArgumentError(f"{self.path}: {self.prefix}{name} {why}")

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(name, f"must be a positive whole number, not {value!r:.40}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.refuse(name, f"must be a number above 0, not {value!r:.40}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            raise self.refuse(name, f"must be true or false, not {value!r:.40}")
        return value

    def tokens(self, name: str) -> tuple[int, ...] | None:
        value = self.values.get(name)
        if value is None:
            return None
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in listed):
            raise self.refuse(name, f"must be a token or a list of them, not {value!r:.40}")
        return tuple(listed)


def read_config(directory: str | Path) -> Config:
    """The configuration of the model in `directory`. Raises `ArgumentError` naming file and field."""
    path = Path(directory) / "config.json"
    fields = _Fields(path, _read(path))
    _check_kind(fields)
    if fields.values.get("hidden_act", "silu") != "silu":
        raise fields.refuse("hidden_act", f"is {fields.values['hidden_act']!r:.40}: only silu is served")
    if fields.values.get("quantization_config"):
        raise fields.refuse("quantization_config", "is there: quantised weights are not served")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    config = Config(
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        layers=fields.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=fields.whole("head_dim", hidden // heads),
        vocab_size=fields.whole("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=fields.whole("max_position_embeddings", 2048),
        tied=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        eos=_eos(Path(directory), fields),
        rope=_rope(fields),
    )
    if config.heads % config.kv_heads:
        raise fields.refuse("num_key_value_heads", f"{config.kv_heads} does not divide {config.heads} heads")
    try:
        Shape(1, 1, config.heads, config.kv_heads, config.head_dim, "float32")
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None
    return config


def _check_kind(fields: _Fields) -> None:
    known = list(_ARCHITECTURES)
    architectures = fields.values.get("architectures") or known
    if not isinstance(architectures, list) or architectures[0] not in known:
        raise fields.refuse("architectures", f"is {architectures!r:.60}: only {known[0]} is served")
    if fields.values.get("model_type", "llama") != "llama":
        raise fields.refuse("model_type", f"is {fields.values['model_type']!r:.40}: only llama is served")


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read ({error.strerror}): name a model directory") from None
    except ValueError as error:
        raise ArgumentError(f"{path}: is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ArgumentError(f"{path}: is not a JSON object")
    return values


def _eos(directory: Path, fields: _Fields) -> tuple[int, ...]:
    """Those of generation_config.json win over those of config.json."""
    path = directory / "generation_config.json"
    generation = _Fields(path, _read(path)).tokens("eos_token_id") if path.exists() else None
    return generation if generation is not None else fields.tokens("eos_token_id") or ()


def _rope(fields: _Fields) -> Rope:
    """Of two dialects in one file rope_scaling goes first, and a theta that it lacks stands beside it: so
    Transformers 5 reads them."""
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    stated = fields.values.get(name) or {}
    if not isinstance(stated, dict):
        raise fields.refuse(name, f"must be an object, not {stated!r:.40}")
    stated = {"rope_theta": fields.values.get("rope_theta", 10000.0)} | stated
    rope = _Fields(fields.path, stated, f"{name}.")
    kind = stated.get("rope_type", stated.get("type", "default"))
    theta = rope.number("rope_theta", 10000.0)
    if kind == "default":
        return Rope(kind, theta)
    if kind == "linear":
        return Rope(kind, theta, rope.number("factor"))
    if kind != "llama3":
        raise rope.refuse("rope_type", f"{kind!r:.40} is not served: default, linear and llama3 are")
    factor, low, high = (rope.number(f"{name}factor") for name in ("", "low_freq_", "high_freq_"))
    if low >= high:
        raise rope.refuse("low_freq_factor", f"{low} must be below high_freq_factor, {high}")
    return Rope(kind, theta, factor, low, high, rope.whole("original_max_position_embeddings"))
