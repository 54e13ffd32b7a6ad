"""The cache of a model, written once and continued by any job: over other ranks, or over cache nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeattn.cache import ShardedCache
from treeattn.errors import ArgumentError
from treeattn.huggingface.layers import FullAttentionLayer
from treeattn.huggingface.remote import RemoteLayer

if TYPE_CHECKING:
    from treeattn.huggingface.cache import ShardedKV


def save(cache: ShardedKV, directory: str | Path) -> None:
    """As `ShardedKV.save`."""
    _check_layers(cache)
    for layer in cache.layers:
        layer._check_whole(0)
    first = cache.layers[0].store.shard
    if first is None or not first.totals.any():
        raise ArgumentError("the cache is empty: there is nothing to save")
    (first if isinstance(first, ShardedCache) else first.cache).save(directory, {"model": cache.model_type})


def load(cache: ShardedKV, directory: str | Path) -> None:
    """As `ShardedKV.load`."""
    from treeattn.cache.index import read_index  # reads and checks JSON: for files alone

    _check_layers(cache)
    if cache.get_seq_length():
        raise ArgumentError(f"the cache has {cache.get_seq_length()} slots already: load into an empty one")
    shards: list[Any]
    if cache.nodes is None:
        shards = list(ShardedCache.load(directory, cache.comm, capacity=cache.capacity).layers)
    else:
        remote = cache.nodes.load(directory, capacity=cache.capacity)
        shards = [RemoteLayer(remote, number) for number in range(len(remote.totals))]
    index = read_index(directory)
    model, slots = index.about.get("model"), index.totals[0]
    if model != cache.model_type or len(shards) != len(cache.layers) or set(index.totals) != {slots}:
        raise ArgumentError(
            f"{directory}: {index.layers} layers of {model!r:.40}, {list(index.totals)!r:.40} tokens; this "
            f"model is {cache.model_type!r} of {len(cache.layers)} layers, and its texts are as long as one "
            "another"
        )
    for layer, shard in zip(cache.layers, shards, strict=True):
        layer.is_initialized, layer.slots = True, slots
        layer.store.hold(shard, slots, index.v_dim if index.latent else 0)


def _check_layers(cache: ShardedKV) -> None:
    full = [layer for layer in cache.layers if isinstance(layer, FullAttentionLayer)]
    if len(full) < len(cache.layers) or full[0].store.alike < len(full):
        raise ArgumentError(
            "a cache is saved whose layers are all of full attention and of one width: windows and recurrent "
            "states lie whole on every rank"
        )
