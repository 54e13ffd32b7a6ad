"""The cache of a model, written once and continued by any job: over other ranks, or over cache nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeattn.cache import ShardedCache
from treeattn.errors import ArgumentError
from treeattn.huggingface.layers import RemoteLayer
from treeattn.huggingface.origin import config_digest
from treeattn.mpi.communicators import Agreement, collectively

if TYPE_CHECKING:
    from treeattn.cache.saved import Index
    from treeattn.huggingface.cache import ShardedKV


def save(cache: ShardedKV, directory: str | Path, unchecked: bool) -> None:
    _check_layers(cache)
    for layer in cache.layers:
        layer.check_whole()
    first = cache.layers[0].shard
    if first is None or not first.totals.any():
        raise ArgumentError("the cache is empty: there is nothing to save")
    about = {"model": cache.model_type, "config": config_digest(cache.config)}
    if not unchecked:
        with Agreement(cache.comm, "save") as agreed:
            agreed.share = described = cache.origin.described(cache)
        if cache.origin.saved is None:
            weights = [of_rank["weights"][0] for of_rank in agreed.gathered]
            described["weights"] = weights if len(set(weights)) > 1 else weights[:1]
        about |= described
    (first if isinstance(first, ShardedCache) else first.cache).save(directory, about)


def load(cache: ShardedKV, directory: str | Path, unchecked: bool, device: Any) -> None:
    from treeattn.cache import saved  # reads and checks JSON: for files alone

    _check_layers(cache)
    if cache.get_seq_length():
        raise ArgumentError(f"the cache has {cache.get_seq_length()} slots already: load into an empty one")
    index = saved.agree(cache.comm, Path(directory))
    collectively(cache.comm, lambda: _check(cache, directory, index, unchecked))
    shards: list[Any]
    if cache.nodes is None:
        read = ShardedCache.load(directory, cache.comm, capacity=cache.capacity, device=device)
        shards = list(read.layers)
    else:
        remote = cache.nodes.load(directory, capacity=cache.capacity)
        shards = [RemoteLayer(remote, number) for number in range(len(remote.totals))]
    cache.device = device
    if not unchecked:
        cache.origin.hold(index.about)
    for layer, shard in zip(cache.layers, shards, strict=True):
        layer.hold(shard, index.totals[0], index.v_dim if index.latent else 0)


def _check(cache: ShardedKV, directory: str | Path, index: Index, unchecked: bool) -> None:
    """Raise `ArgumentError` unless it is of this model, as far as it can be told without ids and weights."""
    about, layers = index.about, len(cache.layers)
    if about.get("model") != cache.model_type or index.layers != layers or len(set(index.totals)) != 1:
        raise ArgumentError(
            f"{directory}: {index.layers} layers of {about.get('model')!r:.40}, {list(index.totals)!r:.40} "
            f"tokens; this model is {cache.model_type!r} of {layers} layers, and its texts are as long as "
            "one another"
        )
    cache.check_fixed(index.totals[0], True if any(about.get("begins") or ()) else None)
    if unchecked:
        return
    rows = [len(about.get(name) or ()) for name in ("ids", "begins")]
    if rows != [len(index.totals)] * 2 or not about.get("weights"):
        raise ArgumentError(
            f"{directory}: does not say of which ids and weights it is made: load(.., unchecked=True) goes "
            "without"
        )
    if about.get("config") != config_digest(cache.config):
        raise ArgumentError(
            f"{directory}: was saved by a model of another configuration (rope_theta, for one), or by "
            "another version of transformers: load(.., unchecked=True) goes without"
        )


def _check_layers(cache: ShardedKV) -> None:
    if len(cache.full) < len(cache.layers) or any(one.width != cache.full[0].width for one in cache.full):
        raise ArgumentError(
            "a cache is saved whose layers are all of full attention and of one width: windows and recurrent "
            "states lie whole on every rank"
        )
