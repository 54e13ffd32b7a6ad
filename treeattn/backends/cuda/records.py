"""What is done with records on an NVIDIA GPU: parts of other kernels packed, merged, finished into results.

The bits are those of `treeattn.partial` and of `treeattn.backends.cpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from treeattn import partial
from treeattn.backends.cuda import pull
from treeattn.backends.cuda.runtime import (
    THREADS,
    Runtime,
    check_float32,
    check_records,
    default_runtime,
    planned_kernel,
    structure,
)
from treeattn.collectives.program import Program
from treeattn.collectives.runtime.operator import Columns
from treeattn.errors import ArgumentError
from treeattn.partial import Array

# MergeArguments, TakeMaximaArguments and RescaleArguments of kernels/cuda/*.cu.
_MERGE = structure("into others", "others_stride", "records width count")
_TAKE_MAXIMA = structure("records maxima", "", "count width")
_RESCALE = structure("records maxima denominators numerators", "denominator_stride numerator_stride", "width")

# FinishArguments of kernels/cuda/finish.cuh.
_FINISH = structure("records out lse", "", "heads queries head_dim")

# PackArguments and ScaleArguments of kernels/cuda/*.cu; ElementType by name, uint16 for the bits of bfloat16.
_PACK = structure("out lse records", "", "head_dim out_type", doubles="factor")
_SCALE = structure("lse", "count", "", doubles="factor")
_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "uint16": 2}


class MergeOperator:
    """How float32 records of one head dimension merge on the device: an `runtime.operator.Operator`."""

    def __init__(self, head_dim: int, dtype: Any = np.float32, *, runtime: Runtime | None = None) -> None:
        """For records of `head_dim` + 2 elements."""
        if np.dtype(dtype) != np.float32:
            raise ArgumentError(f"records on the GPU are float32, not {np.dtype(dtype)}: use device='cpu'")
        #: Elements of one record.
        self.width = head_dim + partial.EXTRA
        #: Element type of a record.
        self.dtype: np.dtype[Any] = np.dtype(np.float32)
        self._runtime = runtime or default_runtime()

    def planned_merge(self, into: Array, other: Array) -> Callable[[], object]:
        """One launch that folds `other` into `into`: C-contiguous [records, width], which never move."""
        return self.planned_merge_many(into, other[None])

    def planned_merge_many(self, into: Array, others: Array) -> Callable[[], object]:
        """Fold others[0], others[1], .. into `into`, in this order, in one launch.

        into: C-contiguous [records, width]; others: [count, records, width]. Neither may ever move.
        """
        count, *shape = others.shape
        if into.shape != (*shape,) or into.shape[-1] != self.width:
            raise ArgumentError(f"records {into.shape} and {others.shape} of width {self.width} cannot merge")
        for name, array in (("into", into), ("other", others)):
            check_float32(self._runtime, name, array, array.shape)
        records = into.size // self.width
        sizes = {"others_stride": into.size, "records": records, "width": self.width, "count": count}
        arrays = {"into": into, "others": others}
        return planned_kernel(self._runtime, "merge_partials", records, _MERGE, **arrays, **sizes)

    def window_bytes(self, program: Program) -> int:
        """Bytes of the memory that every rank exposes, where ranks pull from one another."""
        return pull.window_bytes(program, self.width)

    def resident_blocks(self, records: int) -> int:
        """Blocks of `planned_gets` that this device runs at once."""
        return pull.resident_blocks(records, self._runtime)

    def planned_gets(
        self, records: Array, program: Program, windows: list[int], seconds: float, blocks: int
    ) -> pull.PlannedPull:
        """A step of `program` over C-contiguous records [records, width], which never move, in one launch."""
        self._check_all(records)
        return pull.PlannedPull(records, program, windows, seconds, blocks, runtime=self._runtime)

    def columns(self, records: Array) -> Columns:
        """Maximum, denominator and numerator of records [records, width], as views."""
        return Columns(records[:, 0], records[:, 1], records[:, partial.EXTRA :])

    def planned_maxima(self, records: Array, maxima: Array) -> Callable[[], object]:
        """The maxima of records [records, width] into `maxima` [records], NaN as +inf, in one launch. Neither
        array may ever move."""
        self._check_all(records, maxima)
        sizes, blocks = {"count": len(records), "width": self.width}, -(-len(records) // THREADS)
        arrays = {"records": records, "maxima": maxima}
        return planned_kernel(self._runtime, "take_maxima", blocks, _TAKE_MAXIMA, **arrays, **sizes)

    def planned_rescale(
        self, records: Array, maxima: Array, denominators: Array, numerators: Array
    ) -> Callable[[], object]:
        """Multiply denominators and numerators of [records, width] by exp(maximum - maxima[record]), in one
        launch. A record of nothing seen becomes zeros. None of the arrays may ever move.

        maxima: [records]. denominators [records] and numerators [records, head_dim]: written, of any stride
        between records; they may be the records' own.
        """
        self._check_all(records, maxima)
        count, v_dim = len(records), self.width - partial.EXTRA
        check_float32(self._runtime, "denominators", denominators, (count,), strided=True)
        check_float32(self._runtime, "numerators", numerators, (count, v_dim), strided=True)
        arrays = {"records": records, "maxima": maxima}
        arrays |= {"denominators": denominators, "numerators": numerators}
        sizes = {
            "denominator_stride": denominators.strides[0] // denominators.itemsize,
            "numerator_stride": numerators.strides[0] // numerators.itemsize,
            "width": self.width,
        }
        return planned_kernel(self._runtime, "rescale", count, _RESCALE, **arrays, **sizes)

    def _check_all(self, records: Array, maxima: Array | None = None) -> None:
        check_float32(self._runtime, "records", records, (len(records), self.width))
        if maxima is not None:
            check_float32(self._runtime, "maxima", maxima, (len(records),))


def planned_finish(
    records: Array, out: Array, lse: Array, *, runtime: Runtime | None = None
) -> Callable[[], object]:
    """A launch that turns records into out and lse, as `treeattn.partial.finish` does, to the bit.

    For C-contiguous float32 records [batch, heads, queries, head_dim + 2], out [batch, queries, heads,
    head_dim] and lse [batch, heads, queries] that never move. Raises `ArgumentError`.
    """
    runtime = runtime or default_runtime()
    check_records(records, runtime)
    batch, heads, queries, width = records.shape
    sizes = {"heads": heads, "queries": queries, "head_dim": width - partial.EXTRA}
    check_float32(runtime, "out", out, (batch, queries, heads, sizes["head_dim"]))
    check_float32(runtime, "lse", lse, (batch, heads, queries))
    arrays = {"records": records, "out": out, "lse": lse}
    return planned_kernel(runtime, "finish", batch * heads * queries, _FINISH, **arrays, **sizes)


def planned_pack(
    records: Array, factor: float, *, runtime: Runtime | None = None
) -> Callable[[Any, Any], None]:
    """As `treeattn.backends.cpu.planned_pack`: one launch. Strided arrays are copied on the device first.

    Raises `ArgumentError` for records that are not float32; the call for out of another type than float32,
    float16 or bfloat16, and for lse of another than float32.
    """
    if records.dtype != np.float32:
        raise ArgumentError(f"records on the GPU are float32, not {records.dtype}: use device='cpu'")
    device = runtime or default_runtime()
    width = records.shape[-1]
    fields = {"records": records, "factor": factor, "head_dim": width - partial.EXTRA}
    launch: Any = planned_kernel(device, "pack_partials", records.size // width, _PACK, **fields)
    room: dict[str, Array] = {}

    def pack(out: Array, lse: Array) -> None:
        if out.dtype.name not in _TYPES or lse.dtype != np.float32:
            raise ArgumentError(
                f"out is {out.dtype} and lse {lse.dtype}: on the GPU out is float32, float16 or bfloat16, "
                "and lse float32"
            )
        for name, array in (("out", out), ("lse", lse)):
            device.check(name, array)
            launch.arguments[name] = device.address(_packed(device, room, name, array))
        launch.arguments["out_type"] = _TYPES[out.dtype.name]
        launch()

    return pack


def _packed(device: Runtime, room: dict[str, Array], name: str, array: Array) -> Array:
    """The array if it is contiguous, else a copy that is, in room that is kept."""
    if array.flags.c_contiguous:
        return array
    if array.dtype.name == "bfloat16":
        array = array.view(np.uint16)
    if name not in room or room[name].dtype != array.dtype:
        room[name] = device.empty(array.shape, array.dtype)
    device.copy(room[name], array)
    return room[name]


def planned_scale(lse: Array, factor: float, *, runtime: Runtime | None = None) -> Callable[[], object]:
    """A call that multiplies float32 lse by `factor`, in place: one launch."""
    fields, blocks = {"lse": lse, "factor": factor, "count": lse.size}, -(-lse.size // THREADS)
    return planned_kernel(runtime or default_runtime(), "scale_lse", blocks, _SCALE, **fields)
