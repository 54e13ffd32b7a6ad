"""The heads of a model as the attention of a device has them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from treeattn.attention.shape import Shape
from treeattn.decoder.device import Device
from treeattn.llama.config import Config

__all__ = ["Heads"]


@dataclass(frozen=True, slots=True)
class Heads:
    """Where a device has no kernel for a model's head_dim, zeros fill its heads up to the next one that there
    is: scores stay what they are, and the results of the zeros are cut off.

    head_dim: of the kernels, and so of caches and records. scale: of the model's own.
    """

    device: Device
    heads: int
    kv_heads: int
    head_dim: int
    own: int

    @classmethod
    def of(cls, config: Config, device: Device) -> Heads:
        """Raises `BackendError` where no kernel is wide enough."""
        width = device.kernel_head_dim(config.head_dim)
        return cls(device, config.heads, config.kv_heads, width, config.head_dim)

    @property
    def scale(self) -> float:
        """1 / sqrt(head_dim)"""
        return 1.0 / math.sqrt(self.own)

    @property
    def planned(self) -> dict[str, Any]:
        """What caches and decoders are planned with, by name."""
        kept = {"kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return kept | {"dtype": "float32", "device": self.device.name}

    def shape(self, queries: int) -> Shape:
        """Of one sequence."""
        return Shape(1, queries, self.heads, self.kv_heads, self.head_dim, "float32")

    def filled(self, x: Any) -> Any:
        """q, k or v [tokens, heads, own] as [tokens, heads, head_dim]."""
        if self.own == self.head_dim:
            return x
        wide = self.device.namespace.zeros((*x.shape[:2], self.head_dim), np.float32)
        wide[..., : self.own] = x
        return wide

    def cut(self, attended: Any) -> Any:
        """[tokens, heads, head_dim] as [tokens, heads, own]."""
        return attended[..., : self.own]
