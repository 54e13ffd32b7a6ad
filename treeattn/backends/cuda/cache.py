"""The type of a cache, and of those of 8 bits the scales."""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn.attention.shape import read_scales
from treeattn.backends.cuda.arguments import wrong_type
from treeattn.backends.cuda.runtime import Runtime
from treeattn.backends.cuda.variants import TYPES, TYPES_8
from treeattn.errors import ArgumentError
from treeattn.partial import Array


class CacheType:
    """The type of k and v, and what numbers of 8 bits are multiplied by."""

    def __init__(self, kv_dtype: str | None, k_scale: Any, v_scale: Any) -> None:
        """As `PlannedAttention` takes them. Raises `ArgumentError`."""
        known = {**TYPES, **TYPES_8}
        if kv_dtype is not None and kv_dtype not in known:
            raise ArgumentError(f"kv_dtype {kv_dtype!r} is unknown: use one of {', '.join(known)}")
        self._dtype = kv_dtype
        self._scales: list[Any] = [read_scales("k_scale", k_scale), read_scales("v_scale", v_scale)]
        self._devices: dict[int, Any] = {}

    def kernel_type(self, k: Array, v: Array) -> str:
        """The C++ type. Raises `ArgumentError`."""
        name = self._dtype if self._dtype in TYPES_8 and k.dtype == np.uint8 else k.dtype.name
        if name not in TYPES and name not in TYPES_8:
            raise wrong_type("k", k)
        if k.dtype != v.dtype:
            raise ArgumentError(f"k is {k.dtype} but v is {v.dtype}")
        if name in TYPES_8:
            if any(scale is None for scale in self._scales):
                raise ArgumentError(f"a cache of {name} needs k_scale and v_scale (1.0 where there is none)")
            return TYPES_8[name]
        if any(scale is not None for scale in self._scales):
            raise ArgumentError(f"k_scale and v_scale are for caches of 8 bits, not of {k.dtype}")
        return TYPES[name][0]

    def addresses(self, kv_heads: int, runtime: Runtime) -> tuple[int, int]:
        """Addresses of the scales on the device, [kv_heads] each; 0 where there are none. Raises
        `ArgumentError`."""
        if self._scales[0] is None:
            return 0, 0
        if kv_heads not in self._devices:
            for name, scale in zip(("k_scale", "v_scale"), self._scales, strict=True):
                if (shape := np.shape(scale)) not in ((), (kv_heads,)):
                    raise ArgumentError(f"{name} has shape {list(shape)}: one number, or [{kv_heads}]")
            self._devices[kv_heads] = runtime.zeros(2 * kv_heads, np.float32)
            both = [np.broadcast_to(scale, (kv_heads,)) for scale in self._scales]
            runtime.upload(self._devices[kv_heads], np.concatenate(both, dtype=np.float32))
        place = runtime.address(self._devices[kv_heads])
        return place, place + 4 * kv_heads
