"""Exact attention decode over a KV cache that is sharded across MPI ranks.

>>> import treeattn                                                    # doctest: +SKIP
>>> out, lse = treeattn.decode(q, k, v, comm=comm, scheme="binary_tree")  # doctest: +SKIP

A name is loaded when it is first asked for: a command that simulates schedules needs no attention.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from treeattn.mpi import forked as forked

if TYPE_CHECKING:
    from treeattn import collectives, energy, token_tree
    from treeattn.attention.arguments import CacheFormat, Rules, Shard
    from treeattn.cache import ShardedCache
    from treeattn.decoder.decode import decode
    from treeattn.decoder.decoder import Decoder
    from treeattn.decoder.merge import Merger, merge
    from treeattn.decoder.prefill import Prefill, prefill
    from treeattn.decoder.request import Reduction
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
    from treeattn.selection import schemes

    __version__: str

_PACKAGES = ("collectives", "energy", "token_tree")
_MODULES = {
    "attention.arguments": ("CacheFormat", "Rules", "Shard"),
    "cache": ("ShardedCache",),
    "decoder": ("Decoder", "Merger", "Prefill", "Reduction", "decode", "merge", "prefill"),
    "errors": (
        "ArgumentError", "BackendError", "PeerError", "PeerTimeoutError", "RestrictionError",
        "ScheduleError", "StateError", "TransportError", "TreeattnError",
    ),
    "selection": ("schemes",),
}  # fmt: skip
_HOME = {name: f"treeattn.{module}" for module, names in _MODULES.items() for name in names}

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


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return import_module(f"treeattn.{name}")
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("treeattn")
        except PackageNotFoundError:  # a bare checkout
            return "0+checkout"
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
