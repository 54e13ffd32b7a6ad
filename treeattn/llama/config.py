"""Reads a model's configuration: ``config.json`` in both dialects, and ``generation_config.json``.

Transformers 5 writes ``rope_parameters``; published Llama 3 files have ``rope_theta`` and ``rope_scaling``.
What would give other logits than transformers has is refused by its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, field, structs

from treeattn.attention.shape import Shape
from treeattn.errors import ArgumentError

_ARCHITECTURE = "LlamaForCausalLM"

_Whole = Annotated[int, Meta(ge=1)]
_Number = Annotated[float, Meta(gt=0, lt=1e30)]
_Token = Annotated[int, Meta(ge=0)]


class Rope(msgspec.Struct, frozen=True):
    """Rotary position embedding; kind: default, linear or llama3, whose factors stretch long waves."""

    kind: str = field(name="rope_type", default="default")
    theta: _Number = field(name="rope_theta", default=10000.0)
    factor: _Number = 1.0
    low_freq_factor: _Number = 1.0
    high_freq_factor: _Number = 1.0
    original_max_position_embeddings: _Whole = 0


class Config(msgspec.Struct, frozen=True):
    """The shape of a Llama; eos: the tokens that end a text."""

    hidden_size: _Whole
    intermediate_size: _Whole
    layers: _Whole = field(name="num_hidden_layers")
    heads: _Whole = field(name="num_attention_heads")
    vocab_size: _Whole
    kv_heads: _Whole = field(name="num_key_value_heads", default=0)
    head_dim: _Whole = 0
    rms_norm_eps: _Number = 1e-6
    max_position_embeddings: _Whole = 2048
    tied: bool = field(name="tie_word_embeddings", default=False)
    attention_bias: bool = False
    mlp_bias: bool = False
    eos: tuple[_Token, ...] = field(name="eos_token_id", default=())
    rope: Rope = field(name="rope_parameters", default=Rope())


#: What each kind of rope states, beside its kind and theta.
_ALWAYS = ("rope_type", "rope_theta")
_STATED = {"default": (), "linear": ("factor",), "llama3": Rope.__struct_fields__[2:]}


def read_config(directory: str | Path) -> Config:
    """The configuration of the model in a directory; an `ArgumentError` names file and field."""
    path = Path(directory) / "config.json"
    values, generation = _read(path), path.with_name("generation_config.json")  # which goes first
    said = _read(generation) if generation.exists() else {}
    eos = _eos(generation, said) if "eos_token_id" in said else _eos(path, values)
    try:
        _check_architecture(values)
        config = msgspec.convert(values | {"eos_token_id": eos, "rope_parameters": _rope(values)}, Config)
        heads, kv_heads = config.heads, config.kv_heads or config.heads
        if heads % kv_heads:
            raise ArgumentError(f"num_key_value_heads {kv_heads} does not divide {heads} heads")
        if config.rope.kind == "llama3" and config.rope.low_freq_factor >= config.rope.high_freq_factor:
            raise ArgumentError("low_freq_factor of rope_type llama3 must be below its high_freq_factor")
        head_dim = config.head_dim or config.hidden_size // heads
        Shape(1, 1, heads, kv_heads, head_dim, "float32")
    except (ArgumentError, msgspec.ValidationError) as error:
        raise ArgumentError(f"{path}: {error}") from None
    return structs.replace(config, kv_heads=kv_heads, head_dim=head_dim)


def _read(path: Path) -> dict[str, Any]:
    """An object of JSON, without what is null in it."""
    try:
        values = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read ({error.strerror}): name a model directory") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArgumentError(f"{path}: is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ArgumentError(f"{path}: is not a JSON object")
    return {name: value for name, value in values.items() if value is not None}


def _eos(path: Path, values: dict[str, Any]) -> tuple[int, ...]:
    eos = values.get("eos_token_id", ())
    try:
        return msgspec.convert((eos,) if isinstance(eos, int) else eos, tuple[_Token, ...])
    except msgspec.ValidationError:
        raise ArgumentError(
            f"{path}: eos_token_id must be a token or a list of them, not {eos!r:.60}"
        ) from None


def _check_architecture(values: dict[str, Any]) -> None:
    found = values.get("architectures")
    if not isinstance(found, list) or found[:1] != [_ARCHITECTURE]:
        raise ArgumentError(f"architectures is {found!r:.60}: only {_ARCHITECTURE} is served")
    for name, served in (("model_type", "llama"), ("hidden_act", "silu")):
        if values.get(name, served) != served:
            raise ArgumentError(f"{name} is {values[name]!r:.40}: only {served} is served")
    if values.get("quantization_config"):
        raise ArgumentError("quantization_config is there: quantised weights are not served")
    # As transformers reads it: layer_types, or without them a window or a chunk that all layers have.
    types = values.get("layer_types")
    full = isinstance(types, list) and all(kind == "full_attention" for kind in types)
    for name in ("sliding_window", "attention_chunk_size") if types is None else ("layer_types",):
        if name in values and not full:
            raise ArgumentError(f"{name} is {values[name]!r:.60}: only full attention is served")


def _rope(values: dict[str, Any]) -> Rope:
    """As transformers 5: rope_scaling goes first, and what it lacks is a field of the configuration
    itself."""
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    stated = values.get(name) or {}
    if not isinstance(stated, dict):
        raise ArgumentError(f"{name} must be an object, not {stated!r:.40}")
    for key, value in stated.items():
        if isinstance(value, dict):
            raise ArgumentError(f"{name}.{key} is an object: one rope for all layers is served")
    beside = {key: values[key] for key in ("rope_theta", "partial_rotary_factor") if key in values}
    rope = beside | {key: value for key, value in stated.items() if value is not None}
    kind = rope["rope_type"] = stated.get("rope_type", stated.get("type", "default"))
    if kind not in tuple(_STATED):
        raise ArgumentError(f"{name}.rope_type {kind!r:.40} is not served: {', '.join(_STATED)} are")
    if kind != "default" and (part := rope.get("partial_rotary_factor", 1)) != 1:  # which default leaves out
        raise ArgumentError(f"{name}.partial_rotary_factor is {part!r:.40}: {kind} rotates whole heads")
    if lacking := [key for key in _STATED[kind] if key not in rope]:
        raise ArgumentError(f"{name}.{lacking[0]} is missing, which rope_type {kind} has")
    try:
        return msgspec.convert({key: rope[key] for key in (*_ALWAYS, *_STATED[kind]) if key in rope}, Rope)
    except msgspec.ValidationError as error:
        raise ArgumentError(f"{name}: {error}") from None
