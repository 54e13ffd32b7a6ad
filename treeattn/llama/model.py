"""The layers of a Llama: everything but attention, which is handed in.

After Hugging Face's ``modeling_llama.py``: the norm is computed in float32 and multiplied by its weight
last, query head h reads KV head h // (heads / kv_heads), the gated MLP is down(silu(gate) * up). Arrays are
those of a device, NumPy's or CuPy's, and so are the functions on them (`Device.namespace`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from treeattn import comm as comm_
from treeattn.decoder import device as devices
from treeattn.decoder.device import Device
from treeattn.llama.config import Config, read_config
from treeattn.llama.linear import Gathered, Linear, Reduced, Rows, Stacked
from treeattn.llama.ranks import Axis, Ranks
from treeattn.llama.rope import inverse_frequencies, rotate, rotation
from treeattn.llama.vocabulary import DealtVocabulary, Vocabulary
from treeattn.llama.weights import DrawnWeights, PlacedWeights, Weights, axes, shapes

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["WEIGHTS", "Attend", "Llama"]

#: Where weights are: all on every rank, or each on one.
WEIGHTS = ("replicated", "sharded")

#: Called with a layer's number, q [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim] of the
#: tokens that run through the model, rotated, in arrays that will hold those of the next layer; gives what
#: each query makes of all that it may see, like q, or this rank's heads of it.
Attend = Callable[[int, Any, Any, Any], Any]

_BLOCK = 512  # tokens that go through linear maps at once, where they become several times as wide


class _Layer(NamedTuple):
    input_norm: Any
    qkv: Linear | Stacked
    o: Linear
    post_norm: Any
    gate: Linear
    up: Linear
    down: Linear


class Llama:
    """A model in float32. With `comm`, its ranks hold a part of the weights each: heads of the attention,
    rows and columns of the MLP, rows of the vocabulary; no rank reads another's part.

    `device` is where it computes and where its weights lie, "cpu" or "cuda": each rank's go there once.
    `norms_digest`, of what every rank has whole, tells models of one configuration apart.
    """

    def __init__(self, directory: str | Path, comm: Intracomm | None = None, *, device: str = "cpu") -> None:
        """Raises `ArgumentError` for a directory that holds no such model, `BackendError` for a device that
        is not there; with `comm` on every rank, and then this is collective."""
        if comm is None:
            self._adopt(*_opened(directory), None, device)
            return
        comm = comm_.intracomm(comm)
        with comm_.Agreement(comm) as agreed:
            self._adopt(*_opened(directory), comm, device)
            agreed.equal = {"the model's device": device}

    @classmethod
    def drawn(cls, config: Config, seed: int = 0, *, device: str = "cpu") -> Llama:
        """A model whose weights are drawn, on every rank the same: for times, which do not depend on them."""
        model = cls.__new__(cls)
        model._adopt(config, DrawnWeights(config, seed), None, device)
        return model

    def _adopt(
        self, config: Config, source: Weights | DrawnWeights, comm: Intracomm | None, device: str
    ) -> None:
        self.config, self.comm, self.device = config, comm, devices.find(device)
        self.norms_digest = _norms_digest(source, config)
        weights = PlacedWeights(source, self.device)
        self._norm = weights["model.norm.weight"]
        self._frequencies = inverse_frequencies(self.config.rope, self.config.head_dim)
        names = [f"model.layers.{i}." for i in range(self.config.layers)]
        if comm is None:
            self._vocabulary = _vocabulary(weights, self.config)
            self._layers = [_layer(weights, name) for name in names]
        else:
            ranks = Ranks(comm, self.device)
            self._vocabulary = _dealt_vocabulary(weights, self.config, ranks)
            self._layers = [_sharded_layer(weights, name, self.config, ranks) for name in names]

    @property
    def weight_bytes(self) -> int:
        """Of the weights that this rank holds, in float32."""
        arrays = [self._norm, *self._vocabulary.arrays]
        for layer in self._layers:
            for part in layer:
                arrays += part.arrays if isinstance(part, Linear | Stacked) else [part]
        return sum(int(array.nbytes) for array in arrays)

    def run(self, tokens: Any, positions: Any, attend: Attend, dealt: bool = False) -> Any:
        """Token numbers [tokens] at `positions` [tokens], both of the host, through all layers: float32
        [tokens, hidden_size] on the device.

        Every rank runs the same tokens, or its own (`dealt`); with sharded weights this is collective.
        """
        config, x = self.config, self._vocabulary.vectors(tokens, dealt)
        by, namespace = self._rotation(positions), self.device.namespace
        qkv = namespace.empty((len(x), config.heads + 2 * config.kv_heads, config.head_dim), np.float32)
        q, k, v = namespace.split(qkv, [config.heads, config.heads + config.kv_heads], axis=1)
        for number, layer in enumerate(self._layers):
            self._project(layer, x, by, dealt, qkv)
            self._add_attended(layer, x, attend(number, q, k, v), dealt)
            self._add_mlp(layer, x, dealt)
        return x

    def logits(self, hidden: Any) -> Any:
        """float32 [tokens, vocab_size] of hidden [tokens, hidden_size], the same on every rank, of the host;
        with sharded weights this is collective."""
        return self._vocabulary.logits(self._normed(hidden, self._norm))

    def _rotation(self, positions: Any) -> tuple[Any, Any]:
        """Made on the host, so that every device has the same."""
        cosine, sine = rotation(positions, self._frequencies)
        return self.device.from_host(cosine), self.device.from_host(sine)

    def _project(self, layer: _Layer, x: Any, by: tuple[Any, Any], dealt: bool, qkv: Any) -> None:
        """q, k and v of x into `qkv` [tokens, all of their heads, head_dim], the first two rotated."""
        project, rotated = _placed(layer.qkv, dealt), self.config.heads + self.config.kv_heads
        for rows in _blocks(x):
            made = project(self._normed(x[rows], layer.input_norm)).reshape(qkv[rows].shape)
            qkv[rows, :rotated] = rotate(made[:, :rotated], (by[0][rows], by[1][rows]))
            qkv[rows, rotated:] = made[:, rotated:]

    def _add_attended(self, layer: _Layer, x: Any, attended: Any, dealt: bool) -> None:
        project, width = _placed(layer.o, dealt), attended.shape[1] * attended.shape[2]
        for rows in _blocks(x):
            x[rows] += project(attended[rows].reshape(len(x[rows]), width))

    def _add_mlp(self, layer: _Layer, x: Any, dealt: bool) -> None:
        gate, up, down = (_placed(one, dealt) for one in (layer.gate, layer.up, layer.down))
        for rows in _blocks(x):
            normed = self._normed(x[rows], layer.post_norm)
            x[rows] += down(_silu(gate(normed), self.device) * up(normed))

    def _normed(self, x: Any, weight: Any) -> Any:
        namespace = self.device.namespace
        mean = namespace.mean(x * x, axis=-1, keepdims=True)
        return weight * (x / namespace.sqrt(mean + np.float32(self.config.rms_norm_eps)))


def _opened(directory: str | Path) -> tuple[Config, Weights]:
    config = read_config(directory)
    return config, Weights(directory, config)


def _norms_digest(source: Weights | DrawnWeights, config: Config) -> str:
    """SHA-256 of the norms, in hexadecimal digits."""
    digest = hashlib.sha256()
    for name in shapes(config):
        if name.endswith("norm.weight"):
            digest.update(source[name].tobytes())
    return digest.hexdigest()


def _blocks(x: Any) -> list[slice]:
    """The tokens of x in parts, so that what a layer makes of them on its way takes little memory."""
    return [slice(begin, begin + _BLOCK) for begin in range(0, len(x), _BLOCK)]


def _silu(x: Any, device: Device) -> Any:
    with np.errstate(over="ignore"):  # exp of a large negative x's opposite: the quotient is 0
        return x / (1 + device.namespace.exp(-x))


def _placed(linear: Any, dealt: bool) -> Any:
    """The map for tokens that are each rank's own, or the same on all."""
    return linear.whole() if dealt else linear


def _vocabulary(weights: PlacedWeights, config: Config) -> Vocabulary:
    embedding = weights["model.embed_tokens.weight"]
    return Vocabulary(weights.device, embedding, embedding if config.tied else weights["lm_head.weight"])


def _dealt_vocabulary(weights: PlacedWeights, config: Config, ranks: Ranks) -> Vocabulary:
    tokens = axes(config)["embed_tokens"]
    rows = tokens.part(ranks.rank, ranks.size)
    embedding = weights.part("model.embed_tokens.weight", rows)
    head = embedding if config.tied else weights.part("lm_head.weight", rows)
    return DealtVocabulary(ranks, tokens, embedding, head)


def _layer(weights: PlacedWeights, prefix: str) -> _Layer:
    def linear(name: str) -> Linear:
        weight, bias = weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias")
        return Linear(weights.device, weight, bias)

    return _Layer(
        input_norm=weights[f"{prefix}input_layernorm.weight"],
        qkv=Stacked([linear(f"self_attn.{name}_proj") for name in "qkv"]),
        o=linear("self_attn.o_proj"),
        post_norm=weights[f"{prefix}post_attention_layernorm.weight"],
        gate=linear("mlp.gate_proj"),
        up=linear("mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )


def _sharded_layer(weights: PlacedWeights, prefix: str, config: Config, ranks: Ranks) -> _Layer:
    """Heads and the MLP's width as they are dealt out; norms, and biases of sums, whole."""
    dealt = axes(config)

    def rows(name: str) -> tuple[Axis, Any, Any]:
        axis, bias = dealt[name.split(".")[1]], weights.get(f"{prefix}{name}.bias")
        part = axis.part(ranks.rank, ranks.size)
        return axis, weights.part(f"{prefix}{name}.weight", rows=part), None if bias is None else bias[part]

    def reduced(name: str) -> Reduced:
        axis = dealt[name.split(".")[1]]
        columns = weights.part(f"{prefix}{name}.weight", columns=axis.part(ranks.rank, ranks.size))
        return Reduced(ranks, axis, columns, weights.get(f"{prefix}{name}.bias"))

    outputs, weight, bias = zip(*(rows(f"self_attn.{name}_proj") for name in "qkv"), strict=True)
    stacked = ranks.device.namespace.concatenate
    return _Layer(
        input_norm=weights[f"{prefix}input_layernorm.weight"],
        qkv=Gathered(ranks, outputs, stacked(weight), stacked(bias) if config.attention_bias else None),
        o=reduced("self_attn.o_proj"),
        post_norm=weights[f"{prefix}post_attention_layernorm.weight"],
        gate=Rows(ranks, *rows("mlp.gate_proj")),
        up=Rows(ranks, *rows("mlp.up_proj")),
        down=reduced("mlp.down_proj"),
    )
