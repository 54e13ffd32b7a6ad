"""Records that travel as bfloat16: half the bytes, and what that costs in accuracy.

A record (m, d, n) is the same partial as (m', d c, n c) with c = exp(m - m'). So the maximum is rounded first
and the rest is rescaled to the rounded maximum before it is rounded too: the error stays that of rounding d
and n, 2^-9 for each rounding, instead of growing with the logit. A receiver widens both operands to float32,
merges, and rounds the result. Both are NumPy and the compiled merge; not a path that `decode` offers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from treeattn.backends.cpu import MergeOperator

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Bfloat16Operator:
    """A `collectives.runtime.operator.Operator` on records of bfloat16, held as the uint16 of their bits
    because MPI has no name for them. Commutative to the bit, as the float32 merge is."""

    dtype = np.dtype(np.uint16)

    def __init__(self, head_dim: int) -> None:
        self._merge = MergeOperator(head_dim)
        self.width = self._merge.width

    def planned_merge(self, into: Any, other: Any) -> Callable[[], object]:
        """A call that folds `other` into `into`: C-contiguous [records, width], which never move. The float32
        copies are allocated here, once."""
        left, right = np.empty(into.shape, np.float32), np.empty(other.shape, np.float32)
        merge = self._merge.planned_merge(left, right)
        into, other = into.view(_BFLOAT16), other.view(_BFLOAT16)

        def run() -> None:
            np.copyto(left, into)
            np.copyto(right, other)
            merge()
            np.copyto(into, left, casting="same_kind")

        return run


def narrow(records: Any, wire: Any) -> None:
    """Float32 records [..., width] into uint16 `wire` of the same shape: the nearest bfloat16 records."""
    rounded = wire.view(_BFLOAT16)
    maximum = records[..., :1].astype(_BFLOAT16)
    rounded[..., :1] = maximum
    with np.errstate(invalid="ignore"):  # -inf - -inf, of records that saw nothing: all 0, whatever c
        scale = np.exp(records[..., :1] - maximum.astype(np.float32))
    scale[records[..., :1] == -np.inf] = 1
    rounded[..., 1:] = records[..., 1:] * scale


def widen(wire: Any, records: Any) -> None:
    """What `narrow` wrote, as float32."""
    np.copyto(records, wire.view(_BFLOAT16))
