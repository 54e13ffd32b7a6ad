"""The layers of a Llama on NumPy: everything but attention, which is handed in.

After Hugging Face's ``modeling_llama.py``: the norm is computed in float32 and multiplied by its weight
last, query head h reads KV head h // (heads / kv_heads), the gated MLP is down(silu(gate) * up).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from treeattn.llama.config import Config, read_config
from treeattn.llama.rope import inverse_frequencies, rotate
from treeattn.llama.weights import Weights

__all__ = ["Attend", "Llama"]

#: Called with a layer's number, q [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim] of the
#: tokens that run through the model, rotated; gives what each query makes of all that it may see, like q.
Attend = Callable[[int, Any, Any, Any], Any]


class _Linear(NamedTuple):
    weight: Any
    bias: Any

    def __call__(self, x: Any) -> Any:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class _Layer(NamedTuple):
    input_norm: Any
    q: _Linear
    k: _Linear
    v: _Linear
    o: _Linear
    post_norm: Any
    gate: _Linear
    up: _Linear
    down: _Linear


class Llama:
    """A model whose weights every rank holds whole, in float32."""

    def __init__(self, directory: str | Path) -> None:
        """Raises `ArgumentError` for a directory that holds no such model."""
        self.config: Config = read_config(directory)
        weights = Weights(directory, self.config)
        self._embedding = weights["model.embed_tokens.weight"]
        self._norm = weights["model.norm.weight"]
        self._head = self._embedding if self.config.tied else weights["lm_head.weight"]
        self._layers = [_layer(weights, f"model.layers.{i}.") for i in range(self.config.layers)]
        self._frequencies = inverse_frequencies(self.config.rope, self.config.head_dim)

    @property
    def weight_bytes(self) -> int:
        """Of all weights in float32."""
        layers = [part for layer in self._layers for part in layer]
        arrays = [array for part in layers for array in (part if isinstance(part, _Linear) else (part,))]
        head = [] if self.config.tied else [self._head]
        return sum(
            array.nbytes for array in (*arrays, *head, self._embedding, self._norm) if array is not None
        )

    def run(self, tokens: Any, positions: Any, attend: Attend) -> Any:
        """Token numbers [tokens] at `positions` [tokens] through all layers: float32 [tokens,
        hidden_size]."""
        config, x = self.config, self._embedding[tokens]
        for number, layer in enumerate(self._layers):
            normed = self._normed(x, layer.input_norm)
            q = layer.q(normed).reshape(len(x), config.heads, config.head_dim)
            k = layer.k(normed).reshape(len(x), config.kv_heads, config.head_dim)
            v = layer.v(normed).reshape(len(x), config.kv_heads, config.head_dim)
            q, k = (rotate(one, positions, self._frequencies) for one in (q, k))
            x = x + layer.o(attend(number, q, k, v).reshape(len(x), config.heads * config.head_dim))
            normed = self._normed(x, layer.post_norm)
            gate = layer.gate(normed)
            with np.errstate(over="ignore"):  # exp of a large negative gate's opposite: the product is 0
                x = x + layer.down(gate / (1 + np.exp(-gate)) * layer.up(normed))
        return x

    def logits(self, hidden: Any) -> Any:
        """float32 [tokens, vocab_size] of hidden [tokens, hidden_size]."""
        return self._normed(hidden, self._norm) @ self._head.T

    def _normed(self, x: Any, weight: Any) -> Any:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return weight * (x / np.sqrt(mean + np.float32(self.config.rms_norm_eps)))


def _layer(weights: Weights, prefix: str) -> _Layer:
    def linear(name: str) -> _Linear:
        return _Linear(weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias"))

    return _Layer(
        input_norm=weights[f"{prefix}input_layernorm.weight"],
        q=linear("self_attn.q_proj"),
        k=linear("self_attn.k_proj"),
        v=linear("self_attn.v_proj"),
        o=linear("self_attn.o_proj"),
        post_norm=weights[f"{prefix}post_attention_layernorm.weight"],
        gate=linear("mlp.gate_proj"),
        up=linear("mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )
