"""Exact attention decode over a KV cache that is sharded across MPI ranks.

>>> import treeattn                                                    # doctest: +SKIP
>>> out, lse = treeattn.decode(q, k, v, comm=comm, scheme="binary_tree")  # doctest: +SKIP
"""

from importlib.metadata import PackageNotFoundError, version

from treeattn import collectives, energy, token_tree
from treeattn.cache import ShardedCache
from treeattn.decoder import Decoder, Merger, decode, merge, schemes
from treeattn.errors import (
    ArgumentError,
    BackendError,
    RestrictionError,
    ScheduleError,
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
    "Decoder",
    "Merger",
    "RestrictionError",
    "ScheduleError",
    "ShardedCache",
    "TransportError",
    "TreeattnError",
    "__version__",
    "collectives",
    "decode",
    "energy",
    "merge",
    "schemes",
    "token_tree",
]
