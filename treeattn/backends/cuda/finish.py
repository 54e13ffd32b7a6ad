"""Records into results on an NVIDIA GPU, with the bits of `treeattn.partial`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from treeattn import partial
from treeattn.backends.cuda.runtime import Runtime, check_records, default_runtime, planned_launch, structure
from treeattn.errors import ArgumentError

__all__ = ["PlannedFinish", "finish", "planned_finish"]

# FinishArguments of kernels/cuda/finish.cuh.
_FINISH = structure("records out lse", "", "heads queries head_dim")


def finish(records: Any, out: Any, lse: Any, *, runtime: Runtime | None = None) -> None:
    """Turn records into attention output, as `treeattn.partial.finish` defines it, to the bit.

    Args:
        records: [batch, heads, queries, head_dim + 2].
        out: written, [batch, queries, heads, head_dim].
        lse: written, [batch, heads, queries]. All C-contiguous float32.
        runtime: the device; None is CuPy's current one.

    Raises:
        ArgumentError: shapes, types or strides that do not fit.
    """
    planned_finish(records, out, lse, runtime=runtime)()


class PlannedFinish:
    """`finish` for arrays that never move: one launch, without checks."""

    def __init__(self, arguments: Any, arrays: tuple[Any, ...], launch: Callable[[], object]) -> None:
        """arguments: FinishArguments; arrays: what they point to; launch: with them."""
        self.arguments, self.arrays, self._launch = arguments, arrays, launch

    def __call__(self) -> None:
        """Queue the launch."""
        self._launch()


def planned_finish(records: Any, out: Any, lse: Any, *, runtime: Runtime | None = None) -> PlannedFinish:
    """Checks once. Raises `ArgumentError` as `finish` does."""
    runtime = runtime or default_runtime()
    check_records(records, runtime)
    batch, heads, queries, width = records.shape
    head_dim = width - partial.EXTRA
    for name, array, shape in (
        ("out", out, (batch, queries, heads, head_dim)),
        ("lse", lse, (batch, heads, queries)),
    ):
        runtime.check(name, array)
        if array.shape != shape or array.dtype != np.float32 or not array.flags.c_contiguous:
            raise ArgumentError(
                f"{name} must be C-contiguous float32 of shape {shape}, not {array.dtype} {array.shape}"
            )
    arguments = np.zeros(1, _FINISH)
    arguments["records"], arguments["out"], arguments["lse"] = map(runtime.address, (records, out, lse))
    arguments["heads"], arguments["queries"], arguments["head_dim"] = heads, queries, head_dim
    kernel = runtime.kernel("finish", "finish")
    arrays = records, out, lse
    launch = planned_launch(kernel, batch * heads * queries, arguments, arrays)
    return PlannedFinish(arguments, arrays, launch)
