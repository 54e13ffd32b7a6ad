"""Finished parts into records on the processor: what another kernel made, ready to be merged."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from treeattn import partial
from treeattn.backends.cpu.arguments import Array

__all__ = ["planned_pack", "planned_scale"]


def planned_pack(records: Array, factor: float) -> Callable[[Array, Array], None]:
    """A call with out [.., head_dim] and lse [..] that writes records [.., head_dim + 2].

    The record of a part is (lse * factor, 1, out), `factor` that of the natural logarithm. An lse that is
    infinite or NaN marks a part that saw nothing, whatever its out holds. uint16 is the bits of bfloat16.
    """
    maxima, denominators, numerators = records[..., 0], records[..., 1], records[..., partial.EXTRA :]
    nothing = partial.identity((), numerators.shape[-1], records.dtype)

    def pack(out: Array, lse: Array) -> None:
        with np.errstate(all="ignore"):
            np.multiply(lse, factor, out=maxima, dtype=np.float64, casting="same_kind")
            denominators[...] = 1
            numerators[...] = out.view(ml_dtypes.bfloat16) if out.dtype == np.uint16 else out
        seen = np.isfinite(lse)  # as it came: what its records' type cannot hold must not pass for nothing
        if not seen.all():
            records[~seen] = nothing

    return pack


def planned_scale(lse: Array, factor: float) -> Callable[[], object]:
    """A call that multiplies lse by `factor`, in place."""
    return lambda: np.multiply(lse, factor, out=lse, dtype=np.float64, casting="same_kind")
