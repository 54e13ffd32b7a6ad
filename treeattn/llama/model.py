"""A Llama in the order of a forward pass: RMSNorm, rotary positions, Attention, FeedForward, Llama.

After Hugging Face's ``modeling_llama.py``: the norm is computed in float32 and multiplied by its weight last,
the halves of a head make the pairs that are rotated, query head h reads KV head h // (heads / kv_heads), the
gated MLP is down(silu(gate) * up). Attention over the cache is the caller's (`Attend`). Arrays are those of a
device, NumPy's or CuPy's, and so are the functions on them (`Device.namespace`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from treeattn.attention.shape import DTYPES
from treeattn.backends.device import Device, find
from treeattn.errors import RestrictionError
from treeattn.llama.config import Config, Rope, read_config
from treeattn.llama.tensor_parallel import Linear, Loader, TensorParallelGroup, Tokens
from treeattn.llama.weights import Weights
from treeattn.mpi import communicators
from treeattn.mpi.communicators import Agreement, MpiCommunicator
from treeattn.partial import Array
from treeattn.shards import parts

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

#: Where weights are: all on every rank, or each on one.
WEIGHTS = ("replicated", "sharded")
#: Called with a layer's number, q [tokens, heads, cache_head_dim] and k, v [tokens, kv_heads, cache_head_dim]
#: of the tokens of a forward pass, rotated, in arrays that will hold those of the next layer; returns what
#: each query attends to, like q, or this rank's heads of it.
Attend = Callable[[int, Array, Array, Array], Array]

# Tokens that go through linear maps at once: what these make of them is several times as wide, so that many
# would take much memory.
_BLOCK = 512


class RMSNorm:
    """weight * x / sqrt(mean(x^2) + eps), by rows of x."""

    def __init__(self, device: Device, weight: Array, eps: float) -> None:
        self._namespace, self.weight, self._eps = device.namespace, weight, np.float32(eps)

    def __call__(self, x: Array) -> Array:
        mean = (x * x).sum(axis=-1, keepdims=True) / np.float32(x.shape[-1])
        normed: Array = self.weight * (x / self._namespace.sqrt(mean + self._eps))
        return normed


def inverse_frequencies(rope: Rope, head_dim: int) -> Array:
    """theta^(-2 i / head_dim) as float32 [head_dim / 2], scaled as `rope` says."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1 / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.kind == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.kind == "default":
        return frequencies
    # Llama 3.1: long waves are stretched by the factor, short ones left, those between blended.
    old, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    blend = np.clip((old / (2 * math.pi / frequencies) - low) / (high - low), 0, 1)
    return ((1 - blend) * frequencies / rope.factor + blend * frequencies).astype(np.float32)


def rotation(positions: Tokens, frequencies: Array) -> tuple[Array, Array]:
    """Cosines and sines [tokens, 1, head_dim / 2] of `positions` [tokens]."""
    angles = positions.astype(np.float32)[:, None, None] * frequencies
    return np.cos(angles), np.sin(angles)


def rotate(x: Array, cosine: Array, sine: Array) -> Array:
    """Rotate x [tokens, heads, head_dim] into a new array."""
    half, rotated = x.shape[-1] // 2, x.copy()
    first, second = x[..., :half], x[..., half:]
    rotated[..., :half] = first * cosine - second * sine
    rotated[..., half:] = second * cosine + first * sine
    return rotated


class _Pass(NamedTuple):
    """What the layers of one forward pass share; qkv: all heads of a layer's tokens."""

    attend: Attend
    rotation: tuple[Array, Array]
    qkv: Array
    sequence_parallel: bool

    def placed(self, linear: Linear) -> Linear:
        """The map for tokens that are each rank's own, or the same on all."""
        return linear.gather_weights() if self.sequence_parallel else linear


class Attention:
    """Adds to x what its tokens attend to: o(attention(rotate(qkv(norm(x)))))."""

    def __init__(self, loader: Loader, prefix: str, layer: int, config: Config) -> None:
        norm = loader.tensor(f"{prefix}input_layernorm.weight")
        self._norm = RMSNorm(loader.device, norm, config.rms_norm_eps)
        maps = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
        self._qkv = loader.stacked(*maps, gather_output=True)
        self._o = loader.linear(f"{prefix}self_attn.o_proj")
        self._config, self._layer = config, layer

    def __call__(self, x: Array, run: _Pass) -> None:
        heads, kv_heads = self._config.heads, self._config.kv_heads
        self._project(x, run)
        q, kv = run.qkv[:, :heads], run.qkv[:, heads:]
        attended = run.attend(self._layer, q, kv[:, :kv_heads], kv[:, kv_heads:])[
            ..., : self._config.head_dim
        ]
        o, width = run.placed(self._o), attended.shape[1] * attended.shape[2]
        for rows in parts(len(x), _BLOCK):
            x[rows] += o(attended[rows].reshape(len(x[rows]), width))

    def _project(self, x: Array, run: _Pass) -> None:
        """Write q, k and v of x into `run.qkv`, the first two rotated."""
        qkv, rotated = run.placed(self._qkv), self._config.heads + self._config.kv_heads
        dim, (cosine, sine) = self._config.head_dim, run.rotation
        for rows in parts(len(x), _BLOCK):
            normed = self._norm(x[rows])
            heads = qkv(normed).reshape(len(normed), -1, dim)
            run.qkv[rows, :rotated, :dim] = rotate(heads[:, :rotated], cosine[rows], sine[rows])
            run.qkv[rows, rotated:, :dim] = heads[:, rotated:]


class FeedForward:
    """Adds to x its gated MLP: down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, loader: Loader, prefix: str, config: Config) -> None:
        norm = loader.tensor(f"{prefix}post_attention_layernorm.weight")
        self._norm = RMSNorm(loader.device, norm, config.rms_norm_eps)
        self._gate_up = loader.stacked(f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj")
        self._down = loader.linear(f"{prefix}mlp.down_proj")
        self._exp = loader.device.namespace.exp

    def __call__(self, x: Array, run: _Pass) -> None:
        gate_up, down = map(run.placed, (self._gate_up, self._down))
        for rows in parts(len(x), _BLOCK):
            both = gate_up(self._norm(x[rows]))
            gate, up = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
            x[rows] += down(self._silu(gate) * up)

    def _silu(self, x: Array) -> Array:
        with np.errstate(over="ignore"):  # exp of a large negative x's opposite: the quotient is 0
            gated: Array = x / (1 + self._exp(-x))
        return gated


class Llama:
    """A model from a directory. It computes in float32; on the processor its
    matrices stay of the type that they have.

    With `comm`, its ranks hold a part of the weights each: heads of the attention, rows and columns of the
    MLP, rows of the vocabulary; no rank reads another's part, and making the model is collective. `device` is
    where it computes and where its weights lie, "cpu" or "cuda": each rank's go there once.

    cache_head_dim: of q, k and v, whose heads zeros fill up to the next one that the device has a kernel for:
    scores stay what they are, and the results of the zeros are cut off. dtype: of its matrices.
    reproducible: a token's numbers have the same bits whatever other tokens a pass has, drafts or a
    prompt: linear maps sum in one order, by 16 tokens at a time, which makes a prompt slower.
    mapped: matrices of the processor stay the pages of their files, which processes of a machine share, and
    which are read half as fast as memory in large pages: where several hold the same.
    weight_bytes: what this rank holds.
    norms_digest: SHA-256 of what every rank has whole, which tells models of one configuration apart.

    Raises `ArgumentError` for a directory that holds no such model, `BackendError` for a device that is not
    there or whose kernels are too narrow; with `comm` on every rank.
    """

    def __init__(
        self,
        model: str | Path,
        comm: Intracomm | None = None,
        *,
        device: str = "cpu",
        reproducible: bool = False,
        mapped: bool = False,
    ) -> None:
        self.reproducible = reproducible
        if comm is None:
            self._load(model, None, device, mapped and device == "cpu")
            return
        if reproducible:
            raise RestrictionError(
                "reproducible is for weights that every rank has whole: sums over ranks of sharded ones are "
                "rounded in another order on another number of ranks"
            )
        watched = communicators.mpi_intracomm(comm, "a model with sharded weights")
        with Agreement(watched, "Llama") as agreed:
            self._load(model, watched, device)
            agreed.must_match = {"the model's device": device}

    def _load(
        self,
        model: str | Path,
        comm: MpiCommunicator | None,
        device: str,
        mapped: bool = False,
    ) -> None:
        weights = Weights(model, read_config(model), mapped)
        self.config = config = weights.config
        self.comm, self.device = comm, find(device, "tokens" if self.reproducible else None, 1)
        self.dtype = weights.dtype if device == "cpu" else "float32"
        self.cache_head_dim = self.device.kernel_head_dim(config.head_dim)
        group = None if comm is None else TensorParallelGroup(comm, self.device)
        loader = Loader(weights, self.device, group)
        self._embedding, self._head = loader.vocabulary()
        self._layers: list[tuple[Attention, FeedForward]] = []
        for layer in range(config.layers):
            prefix = f"model.layers.{layer}."
            self._layers.append(
                (Attention(loader, prefix, layer, config), FeedForward(loader, prefix, config))
            )
        self._norm = RMSNorm(self.device, loader.tensor("model.norm.weight"), config.rms_norm_eps)
        self._frequencies = inverse_frequencies(config.rope, config.head_dim)
        self.weight_bytes, digest = loader.nbytes, hashlib.sha256()
        for name in weights.shapes:
            if name.endswith("norm.weight"):
                digest.update(weights.read(name).tobytes())
        self.norms_digest = digest.hexdigest()

    def forward(
        self,
        tokens: Tokens,
        positions: Tokens,
        attend: Attend,
        *,
        sequence_parallel: bool = False,
        dtype: str = "float32",
    ) -> Array:
        """Run tokens [tokens] at `positions` [tokens], both of the host, through all layers: float32 [tokens,
        hidden_size] on the device, before the last norm.

        Every rank runs the same tokens, or its own (`sequence_parallel`); with sharded weights this is
        collective. dtype: of the q, k and v that `attend` is given.
        """
        x = self._embedding(tokens, sequence_parallel)
        # Angles are made on the host, so that every device has the same.
        cosine, sine = map(self.device.from_host, rotation(positions, self._frequencies))
        heads = self.config.heads + 2 * self.config.kv_heads
        qkv = self.device.namespace.zeros((len(x), heads, self.cache_head_dim), DTYPES[dtype])
        run = _Pass(attend, (cosine, sine), qkv, sequence_parallel)
        for attention, feed_forward in self._layers:
            attention(x, run)
            feed_forward(x, run)
        return x

    def logits(self, hidden: Array) -> Array:
        """What `forward` made of tokens as logits, float32 [tokens, vocab_size], of the host: the same on
        every rank where `hidden` is. With sharded weights this is collective."""
        return self.device.readable(self._head(self._norm(hidden)))
