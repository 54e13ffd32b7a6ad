"""A decoder's step as one C call: attention, reduction and finish."""

from __future__ import annotations

import ctypes
import functools

from treeattn.backends.cpu import arguments, kernels
from treeattn.backends.cpu.arguments import Array
from treeattn.backends.cpu.attention import PlannedAttention
from treeattn.collectives.runtime.reducer import NativeStep

__all__ = ["PlannedStep"]


class _Step(ctypes.Structure):
    """struct decode_step of kernels/cpu/decode_step.c."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("attention", "reduce", "reduction")]
        + [("nanoseconds", ctypes.c_int64)]
        + [(name, ctypes.c_void_p) for name in ("records", "out", "lse")]
        + [(name, ctypes.c_int64) for name in ("batch", "heads", "queries", "width")]
    )


class PlannedStep:
    """`attention`, the reduction that `native` tells of, and `planned_finish`: the same bits in one call."""

    def __init__(
        self, attention: PlannedAttention, native: NativeStep, records: Array, out: Array, lse: Array
    ) -> None:
        """For compiled kernels. records: [batch, heads, queries, head_dim + 2], which `attention` writes."""
        compiled = kernels.loaded()[0]
        assert compiled is not None, "a native step without compiled kernels"
        self._takes = attention.takes
        self._owned = attention, records, out, lse
        self._struct = _Step(
            attention.address, *native[:3], *map(arguments.address, (records, out, lse)), *records.shape
        )
        self._call = functools.partial(compiled.decode_step, ctypes.byref(self._struct))
        self._step = native.as_step(self._call)
        self._finish = arguments.planned(compiled.finish, records, out, lse, *records.shape)

    def __call__(self, q: Array, k: Array, v: Array, lengths: Array | None = None) -> bool:
        """One step. False: nothing was done, since these arrays or the state of the reducer need a closer
        look, which the three parts take."""
        if not self._takes(q, k, v, lengths):
            return False
        result = self._step()
        if result > 0:  # the reduction took longer than one call
            self._finish()
        return result >= 0
