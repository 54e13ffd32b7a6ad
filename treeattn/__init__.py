"""Exact attention decode over a KV cache that is sharded across MPI ranks.

>>> import treeattn                                                    # doctest: +SKIP
>>> out, lse = treeattn.decode(q, k, v, comm=comm, scheme="binary_tree")  # doctest: +SKIP
"""

from importlib.metadata import PackageNotFoundError, version

from treeattn import collectives, energy, token_tree
from treeattn.attention.mask import Rules
from treeattn.attention.shard import CacheFormat, Shard
from treeattn.cache import ShardedCache
from treeattn.decoder import Decoder, Merger, Prefill, Reduction, decode, merge, prefill, schemes
from treeattn.errors import (
    ArgumentError,
    BackendError,
    PeerError,
    PeerTimeoutError,
    RestrictionError,
    ScheduleError,
    StateError,
    TransportError,
    TreeattnError,
)

try:
    __version__ = version("treeattn")
except PackageNotFoundError:  # a bare checkout
    __version__ = "0+checkout"

__all__ = [
    "ArgumentError",
    "BackendError",
    "CacheFormat",
    "Decoder",
    "Merger",
    "PeerError",
    "PeerTimeoutError",
    "Prefill",
    "Reduction",
    "RestrictionError",
    "Rules",
    "ScheduleError",
    "Shard",
    "ShardedCache",
    "StateError",
    "TransportError",
    "TreeattnError",
    "__version__",
    "collectives",
    "decode",
    "energy",
    "merge",
    "prefill",
    "schemes",
    "token_tree",
]
