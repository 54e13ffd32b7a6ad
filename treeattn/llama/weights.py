"""The tensors of a model directory: safetensors, mapped, one file or several with an index."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from treeattn import files
from treeattn.decoder.device import Device
from treeattn.errors import ArgumentError
from treeattn.llama.config import Config
from treeattn.llama.ranks import Axis

__all__ = ["DrawnWeights", "PlacedWeights", "Weights", "axes", "shapes", "sharded_bytes"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a model of this configuration has; linear maps are [out, in]."""
    h, mlp = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    named: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, h),
        "model.norm.weight": (h,),
    }
    if not config.tied:
        named["lm_head.weight"] = (config.vocab_size, h)
    linear = {
        "self_attn.q_proj": (q, h, config.attention_bias),
        "self_attn.k_proj": (kv, h, config.attention_bias),
        "self_attn.v_proj": (kv, h, config.attention_bias),
        "self_attn.o_proj": (h, q, config.attention_bias),
        "mlp.gate_proj": (mlp, h, config.mlp_bias),
        "mlp.up_proj": (mlp, h, config.mlp_bias),
        "mlp.down_proj": (h, mlp, config.mlp_bias),
    }
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            named[f"{prefix}{norm}.weight"] = (h,)
        for name, (rows, columns, biased) in linear.items():
            named[f"{prefix}{name}.weight"] = (rows, columns)
            if biased:
                named[f"{prefix}{name}.bias"] = (rows,)
    return named


def axes(config: Config) -> dict[str, Axis]:
    """What is dealt out over ranks where weights are sharded, by the last word of a matrix's name: rows; of
    o_proj and down_proj columns."""
    heads, kv_heads = (Axis(count, config.head_dim) for count in (config.heads, config.kv_heads))
    tokens, mlp = Axis(config.vocab_size), Axis(config.intermediate_size)
    attention = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads, "o_proj": heads}
    dense = {"gate_proj": mlp, "up_proj": mlp, "down_proj": mlp}
    return {"embed_tokens": tokens, "lm_head": tokens} | attention | dense


def sharded_bytes(config: Config, size: int) -> int:
    """Of the weights, in float32, what the fullest of so many ranks has of them."""
    dealt, everyones = axes(config), 0
    of_a_row: Counter[Axis] = Counter()
    for name, shape in shapes(config).items():
        axis, count = dealt.get(name.split(".")[-2]), math.prod(shape)
        summed = len(shape) == 1 and ("o_proj" in name or "down_proj" in name)  # added once, by every rank
        if axis is None or summed:
            everyones += count
        else:
            of_a_row[axis] += count // axis.length

    def part(rank: int) -> int:
        parts = ((axis.part(rank, size), count) for axis, count in of_a_row.items())
        return sum((rows.stop - rows.start) * count for rows, count in parts)

    return 4 * (everyones + max(part(rank) for rank in range(size)))


class Weights:
    """Tensors by name, mapped from their files: ranks of a node share the pages."""

    def __init__(self, directory: str | Path, config: Config) -> None:
        """Tensors that the configuration does not ask for are left alone, as by Hugging Face.

        Raises `ArgumentError` naming file and tensor: a missing shard or tensor, a shape or type that the
        configuration does not have.
        """
        self._tensors: dict[str, Any] = {}
        self._files: dict[str, files.CacheFile] = {}
        directory, wanted = Path(directory), shapes(config)
        for path, names in _files(directory).items():
            held = files.open_cache(path)
            present = [*held.tensors, *held.unsupported]
            for name in present if names is None else names:
                if name in wanted and name not in present:
                    raise ArgumentError(f"{path}: has no tensor {name}, which {_INDEX} places there")
                if name in wanted:
                    self._tensors[name], self._files[name] = held[name], held
        for name, shape in wanted.items():
            if name not in self._tensors:
                where = directory / (_INDEX if _indexed(directory) else _SINGLE)
                raise ArgumentError(f"{where}: has no tensor {name}, which config.json asks for")
            tensor, where = self._tensors[name], self._files[name].path
            if tensor.shape != shape:
                raise ArgumentError(
                    f"{where}: {name} has shape {list(tensor.shape)}, config.json makes it {list(shape)}"
                )
            if str(tensor.dtype) not in ("float32", "float16", "bfloat16"):
                raise ArgumentError(
                    f"{where}: {name} is {tensor.dtype}: weights are float32, float16 or bfloat16"
                )

    def __getitem__(self, name: str) -> Any:
        """As float32: the mapped pages where the file holds that, else a copy."""
        return np.asarray(self._tensors[name], np.float32)

    def part(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Any:
        """Rows or columns of a matrix, as float32 in memory of its own; nothing else of it is read."""
        height, width = self._tensors[name].shape
        chosen = (
            range(n)[slice(None) if one is None else one] for n, one in ((height, rows), (width, columns))
        )
        return np.asarray(self._files[name].read(name, *chosen), np.float32)

    def get(self, name: str) -> Any:
        """The same, or None for a tensor that the model does not have."""
        return self[name] if name in self._tensors else None


class DrawnWeights:
    """What `Weights` would give of a model that is none: norms of 1, all else drawn."""

    def __init__(self, config: Config, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._tensors = {name: self._drawn(rng, shape) for name, shape in shapes(config).items()}

    @staticmethod
    def _drawn(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return rng.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def get(self, name: str) -> Any:
        """The same, or None for a tensor that the model does not have."""
        return self._tensors.get(name)


class PlacedWeights:
    """What `Weights` or `DrawnWeights` give, on a device: each array goes there when it is asked for."""

    def __init__(self, weights: Weights | DrawnWeights, device: Device) -> None:
        self._weights, self.device = weights, device

    def __getitem__(self, name: str) -> Any:
        return self.device.from_host(self._weights[name])

    def part(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Any:
        """As `Weights.part`."""
        assert isinstance(self._weights, Weights)
        return self.device.from_host(self._weights.part(name, rows, columns))

    def get(self, name: str) -> Any:
        """As `Weights.get`."""
        found = self._weights.get(name)
        return None if found is None else self.device.from_host(found)


def _indexed(directory: Path) -> bool:
    """A file of everything goes before an index that lies beside it, as with Hugging Face."""
    return (directory / _INDEX).exists() and not (directory / _SINGLE).exists()


def _files(directory: Path) -> dict[Path, list[str] | None]:
    """Each file with the names that are to be taken from it; None is all."""
    if not _indexed(directory):
        return {directory / _SINGLE: None}
    index = directory / _INDEX
    try:
        placed = json.loads(index.read_text())["weight_map"]
        found: dict[Path, list[str] | None] = {}
        for name, file in placed.items():
            names = found.setdefault(directory / file, [])
            assert names is not None
            names.append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"{index}: is not an index of safetensors ({type(error).__name__})") from None
    return found
