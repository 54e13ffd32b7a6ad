"""The middle of a reduction by built-in operators: records over a maximum that all ranks share.

Where only MAX and SUM are at hand, the maxima are reduced first; then each rank rescales its records to the
common maximum, and denominators and numerators are plain sums (Shyam et al., arXiv 2408.04093, Algorithm 3).
"""

from __future__ import annotations

import numpy as np

from treeattn import partial
from treeattn.backends.cpu.arguments import Array

__all__ = ["rescale_records"]


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
        factor = np.where(np.isnan(own) | np.isnan(shared), np.nan, factor).astype(records.dtype, copy=False)
        np.multiply(records[:, 1], factor, out=denominators)
        np.multiply(records[:, partial.EXTRA :], factor[:, None], out=numerators)
    empty = own == -np.inf
    denominators[empty] = 0
    numerators[empty] = 0
