"""Finished parts into records on an NVIDIA GPU, with the bits of `treeattn.backends.cpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from treeattn import partial
from treeattn.backends.cuda.runtime import THREADS, Runtime, default_runtime, planned_launch, structure
from treeattn.errors import ArgumentError

__all__ = ["planned_pack", "planned_scale"]

# PackArguments and ScaleArguments of kernels/cuda/*.cu; ElementType by name, uint16 for the bits of bfloat16.
_PACK = structure("out lse records", "", "head_dim out_type", doubles="factor")
_SCALE = structure("lse", "count", "", doubles="factor")
_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "uint16": 2}


def planned_pack(
    records: Any, factor: float, *, runtime: Runtime | None = None
) -> Callable[[Any, Any], None]:
    """As `treeattn.backends.cpu.planned_pack`: one launch. Strided arrays are copied on the device first.

    Raises `ArgumentError` for records that are not float32; the call for out of another type than float32,
    float16 or bfloat16, and for lse of another than float32.
    """
    if records.dtype != np.float32:
        raise ArgumentError(f"records on the GPU are float32, not {records.dtype}: use device='cpu'")
    device = runtime or default_runtime()
    width = records.shape[-1]
    arguments = np.zeros(1, _PACK)
    arguments["records"], arguments["factor"] = device.address(records), factor
    arguments["head_dim"] = width - partial.EXTRA
    launch = planned_launch(
        device.kernel("pack_partials", "pack_partials"), records.size // width, arguments, (records,)
    )
    room: dict[str, Any] = {}

    def pack(out: Any, lse: Any) -> None:
        if out.dtype.name not in _TYPES or lse.dtype != np.float32:
            raise ArgumentError(
                f"out is {out.dtype} and lse {lse.dtype}: on the GPU out is float32, float16 or bfloat16, "
                "and lse float32"
            )
        for name, array in (("out", out), ("lse", lse)):
            device.check(name, array)
            arguments[name] = device.address(_packed(device, room, name, array))
        arguments["out_type"] = _TYPES[out.dtype.name]
        launch()

    return pack


def _packed(device: Runtime, room: dict[str, Any], name: str, array: Any) -> Any:
    """The array if it is contiguous, else a copy that is, in room that is kept."""
    if array.flags.c_contiguous:
        return array
    if array.dtype.name == "bfloat16":
        array = array.view(np.uint16)
    if name not in room or room[name].dtype != array.dtype:
        room[name] = device.empty(array.shape, array.dtype)
    device.copy(room[name], array)
    return room[name]


def planned_scale(lse: Any, factor: float, *, runtime: Runtime | None = None) -> Callable[[], object]:
    """A call that multiplies float32 lse by `factor`, in place: one launch."""
    device = runtime or default_runtime()
    arguments = np.zeros(1, _SCALE)
    arguments["lse"], arguments["factor"], arguments["count"] = device.address(lse), factor, lse.size
    blocks = -(-lse.size // THREADS)
    return planned_launch(device.kernel("scale_lse", "scale_lse"), blocks, arguments, (lse,))
