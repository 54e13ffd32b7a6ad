"""The middle of a reduction by built-in operators: records over a maximum that all ranks share.

Where only MAX and SUM are at hand, the maxima are reduced first; then each rank rescales its records to the
common maximum, and denominators and numerators are plain sums (Shyam et al., arXiv 2408.04093, Algorithm 3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from treeattn import partial
from treeattn.backends.cpu import arguments, kernels
from treeattn.backends.cpu.arguments import Array

__all__ = ["planned_rescale", "rescale_records"]


def planned_rescale(
    records: Array, shared: Array, denominators: Array, numerators: Array
) -> Callable[[], object]:
    """`rescale_records` for arrays that never move: a call without arguments and without checks.

    Compiled for float32 where there is a compiler, else NumPy; the bits are the same.
    """
    compiled = kernels.loaded()[0]
    if compiled is None or records.dtype != np.float32:
        return functools.partial(rescale_records, records, shared, denominators, numerators)
    denominator_stride, numerator_stride = (
        array.strides[0] // array.itemsize for array in (denominators, numerators)
    )
    return arguments.planned(
        compiled.rescale_records,
        *(records, shared, denominators, denominator_stride, numerators, numerator_stride, *records.shape),
    )


def rescale_records(records: Array, shared: Array, denominators: Array, numerators: Array) -> None:
    """Write the sums of `records` over the maximum `shared`, which is at least their own.

    Args:
        records: [count, head_dim + 2], float32 or float64.
        shared: [count], the largest maximum of all ranks, NaN aside.
        denominators: written, [count], any stride.
        numerators: written, [count, head_dim], rows of any stride.

    A record of nothing gives zeros, also where no rank saw anything; a maximum of NaN gives NaN.
    """
    own = records[:, 0]
    with np.errstate(all="ignore"):
        lower = np.where(own == shared, 0, own - shared)
        factor = np.exp(lower) if records.dtype == np.float64 else partial.exponential(lower)
        factor = np.where(np.isnan(own), np.nan, factor).astype(records.dtype, copy=False)
        np.multiply(records[:, 1], factor, out=denominators)
        np.multiply(records[:, partial.EXTRA :], factor[:, None], out=numerators)
    empty = own == -np.inf
    denominators[empty] = 0
    numerators[empty] = 0
