"""Reads the tensors of a model directory: safetensors, mapped, one file or several with an index."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from treeattn import files
from treeattn.errors import ArgumentError
from treeattn.llama.config import Config
from treeattn.partial import Array

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model by its name; linear maps are [out, in]."""
    h, mlp = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    named: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, h), "model.norm.weight": (h,)}
    if not config.tied:
        named[HEAD] = (config.vocab_size, h)
    attention = {"q_proj": (q, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, q)}
    mlps = {"gate_proj": (mlp, h), "up_proj": (mlp, h), "down_proj": (h, mlp)}
    parts = ("self_attn", attention, config.attention_bias), ("mlp", mlps, config.mlp_bias)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            named[f"{prefix}{norm}.weight"] = (h,)
        for part, maps, biased in parts:
            for name, shape in maps.items():
                named[f"{prefix}{part}.{name}.weight"] = shape
                if biased:
                    named[f"{prefix}{part}.{name}.bias"] = shape[:1]
    return named


class Weights:
    """The tensors of a directory by name. mapped: matrices that are read whole are the pages of their files,
    which ranks of a node share.

    dtype: the name of the embedding's, and so of most matrices.

    Tensors that the configuration does not ask for are left alone, as by Hugging Face. An `ArgumentError`
    names file and tensor where one is missing, or of a shape or type that the configuration does not have.
    """

    def __init__(self, directory: str | Path, config: Config, mapped: bool = False) -> None:
        self.config, self.shapes, self.mapped = config, shapes(config), mapped
        self._files: dict[str, files.CacheFile] = {}
        index, single = Path(directory) / _INDEX, Path(directory) / _SINGLE
        # A file of everything goes before an index that lies beside it, as with Hugging Face.
        placed = _read_index(index) if index.exists() and not single.exists() else {single: None}
        for path, names in placed.items():
            file = files.open_cache(path)
            present = {*file.tensors, *file.unsupported}
            # The head also where ends are tied: see `check_tied`.
            for name in {*self.shapes, HEAD} & (present if names is None else names):
                if name not in present:
                    raise ArgumentError(f"{path}: has no tensor {name}, which {_INDEX} places there")
                self._files[name] = file
        for name, shape in self.shapes.items():
            if name not in self._files:
                where = single if single in placed else index
                raise ArgumentError(f"{where}: has no tensor {name}, which config.json asks for")
            _check(self._files[name], name, shape)
        self.dtype = str(self._files[EMBEDDING][EMBEDDING].dtype)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Array:
        """A matrix as the file holds it, its pages where it is mapped, else it or a part of it in memory of
        its own. A vector as float32."""
        tensor = self._files[name][name]
        if tensor.ndim == 1:
            return np.asarray(tensor[rows or slice(None)], np.float32)
        part: Array = tensor[rows or slice(None), columns or slice(None)]
        return part if self.mapped and rows is columns is None else np.array(part)

    def check_tied(self, rows: slice | None) -> None:
        """Raise `ArgumentError` where the file has another head, which Hugging Face then takes."""
        if HEAD in self._files and not np.array_equal(self.read(HEAD, rows), self.read(EMBEDDING, rows)):
            raise ArgumentError(
                f"{self._files[HEAD].path}: {HEAD} is not {EMBEDDING}, to which config.json's "
                "tie_word_embeddings ties it: say false there, or leave the tensor out"
            )


def _read_index(path: Path) -> dict[Path, set[str] | None]:
    """The files that an index names, each with the tensors to take from it."""
    try:
        placed: dict[str, str] = json.loads(path.read_text())["weight_map"]
        named = {name: path.with_name(file) for name, file in placed.items()}
        if not all(file.name.isprintable() and len(file.name) < 256 for file in named.values()):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArgumentError(f"{path}: is not an index of safetensors ({type(error).__name__})") from None
    return {file: {name for name, other in named.items() if other == file} for file in named.values()}


def _check(file: files.CacheFile, name: str, shape: tuple[int, ...]) -> None:
    tensor = file[name]
    if tensor.shape != shape:
        raise ArgumentError(
            f"{file.path}: {name} has shape {list(tensor.shape)}, config.json makes it {list(shape)}"
        )
    if str(tensor.dtype) not in ("float32", "float16", "bfloat16"):
        raise ArgumentError(
            f"{file.path}: {name} is {tensor.dtype}: weights are float32, float16 or bfloat16"
        )
