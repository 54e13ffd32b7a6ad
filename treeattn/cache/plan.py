"""What all layers of a sharded cache have in common."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from treeattn.attention.shape import CACHE_DTYPES, DTYPES, FLOAT8, Shape, bits_of, check_number
from treeattn.backends import device as devices
from treeattn.backends.device import Device
from treeattn.cache.placement import Placement, Reach
from treeattn.errors import ArgumentError


class Plan(NamedTuple):
    """shape: of the cache, as of a `Decoder` over it. latent: whether the first channels of k are the values.
    elements: of its arrays. drafts: slots beside each shard. rank: whose part this is."""

    shape: Shape
    latent: bool
    elements: np.dtype[Any]
    drafts: int
    placement: Placement
    rank: int
    device: Device

    @classmethod
    def of(
        cls,
        held: dict[str, Any],
        latent: bool,
        *,
        capacity: Any,
        layout: Any,
        drafts: Any,
        device: str,
        rank: int,
        size: int,
    ) -> Plan:
        """held: batch, kv_heads, head_dim, dtype, v_dim and scales as a `ShardedCache` takes them. Raises
        `ArgumentError`."""
        dtype, head_dim = held["dtype"], held["head_dim"]
        queries = "float32" if dtype in FLOAT8 else dtype
        shape = Shape(
            held["batch"], 1, held["kv_heads"], held["kv_heads"], head_dim, queries,
            dtype if dtype not in DTYPES else None, held["k_scale"], held["v_scale"], held["v_dim"] or 0,
        )  # fmt: skip
        check_number("capacity", capacity)
        check_number("drafts", drafts, 0)
        if latent and shape.v_dim > head_dim:
            raise ArgumentError(
                f"v_dim {shape.v_dim} of a latent cache must be a number of k's {head_dim} channels"
            )
        bits = bits_of(dtype) if device != "cpu" else None
        elements = np.dtype(bits) if bits else CACHE_DTYPES[dtype]
        placement = Placement(layout, int(capacity), rank, size)
        return cls(shape, bool(latent), elements, int(drafts), placement, rank, devices.find(device))

    def empty_reach(self) -> Reach:
        """Of layers without tokens."""
        return Reach(self.placement, np.zeros(self.shape.batch, np.int64))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the arrays of a layer."""
        return ("k",) if self.latent else ("k", "v")

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of these arrays."""
        return (self.shape.head_dim, self.shape.v_dim)[: len(self.names)]
