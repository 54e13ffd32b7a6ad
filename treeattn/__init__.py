"""Exact attention decode over a KV cache that is sharded across MPI ranks.

>>> import treeattn                                                    # doctest: +SKIP
>>> out, lse = treeattn.decode(q, k, v, comm=comm, scheme="binary_tree")  # doctest: +SKIP
"""

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """Look up ``__version__`` where it is asked for, not in every start of a command."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("treeattn")
        except PackageNotFoundError:  # a bare checkout
            return "0+checkout"


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
