"""How records merge on an NVIDIA GPU, with the bits of `treeattn.partial`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from treeattn import partial
from treeattn.backends.cuda.runtime import Runtime, default_runtime, planned_launch, structure
from treeattn.errors import ArgumentError

__all__ = ["MergeOperator", "merge"]

# MergeArguments and RescaleArguments of kernels/cuda/*.cu.
_MERGE = structure("into others", "others_stride", "records width count")
_RESCALE = structure("records maxima", "", "width keep_maximum")


def merge(into: Any, other: Any, *, runtime: Runtime | None = None) -> None:
    """Fold `other` into `into`, in place: float32 records [..., head_dim + 2] of one shape.

    Raises:
        ArgumentError: they differ in shape or type, or are not C-contiguous.
    """
    MergeOperator(into.shape[-1] - partial.EXTRA, runtime=runtime).planned_merge(into, other)()


class MergeOperator:
    """How float32 records of one head dimension merge on the device: an `operator.Operator`."""

    def __init__(self, head_dim: int, dtype: Any = np.float32, *, runtime: Runtime | None = None) -> None:
        """For records of `head_dim` + 2 elements."""
        if np.dtype(dtype) != np.float32:
            raise ArgumentError(f"records on the GPU are float32, not {np.dtype(dtype)}: use device='cpu'")
        self._width = head_dim + partial.EXTRA
        self._runtime = runtime or default_runtime()

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of a record."""
        return np.dtype(np.float32)

    @property
    def width(self) -> int:
        """Elements of one record: head_dim + 2."""
        return self._width

    def merge(self, into: Any, other: Any) -> None:
        """Fold `other` into `into`, in place; both C-contiguous [records, width]."""
        self.planned_merge(into, other)()

    def planned_merge(self, into: Any, other: Any) -> Callable[[], object]:
        """`merge` for two arrays that never move: one launch, without checks."""
        self._check(into, other, into.shape)
        return self._plan(into, other, 1)

    def planned_merge_many(self, into: Any, others: Any) -> Callable[[], object]:
        """Fold others[0], others[1], .. into `into`, in this order, in one launch.

        into: C-contiguous [records, width]; others: [count, records, width]. Neither may ever move.
        """
        self._check(into, others, (others.shape[0], *into.shape))
        return self._plan(into, others, others.shape[0])

    def planned_rescale(self, records: Any, maxima: Any, keep_maximum: bool) -> Callable[[], object]:
        """Multiply each of records [records, width] by exp(its maximum - maxima[record]), in one launch.

        keep_maximum: leave that of `maxima` [records] in its place, otherwise 0. A record of nothing seen
        becomes zeros. For reductions that can only add. Neither array may ever move.
        """
        for name, array, shape in (("records", records, (records.shape[0], self._width)),
                                   ("maxima", maxima, records.shape[:1])):  # fmt: skip
            self._runtime.check(name, array)
            if array.shape != shape or array.dtype != np.float32 or not array.flags.c_contiguous:
                raise ArgumentError(f"{name} must be C-contiguous float32 {shape}, not {array.dtype}")
        arguments = np.zeros(1, _RESCALE)
        arguments["records"], arguments["maxima"] = map(self._runtime.address, (records, maxima))
        arguments["width"], arguments["keep_maximum"] = self._width, keep_maximum
        return planned_launch(
            self._runtime.kernel("rescale", "rescale"), len(records), arguments, (records, maxima)
        )

    def _check(self, into: Any, others: Any, shape: tuple[int, ...]) -> None:
        self._runtime.check("into", into)
        self._runtime.check("other", others)
        if others.shape != shape or into.shape[-1] != self._width:
            raise ArgumentError(
                f"records {into.shape} and {others.shape} of width {self._width} cannot merge"
            )
        for array in (into, others):
            if array.dtype != np.float32 or not array.flags.c_contiguous:
                raise ArgumentError(f"records to merge must be C-contiguous float32, not {array.dtype}")

    def _plan(self, into: Any, others: Any, count: int) -> Callable[[], object]:
        arguments = np.zeros(1, _MERGE)
        records = into.size // self._width
        arguments["into"], arguments["others"] = self._runtime.address(into), self._runtime.address(others)
        arguments["others_stride"], arguments["count"] = into.size, count
        arguments["records"], arguments["width"] = records, self._width
        kernel = self._runtime.kernel("merge_partials", "merge_partials")
        return planned_launch(kernel, records, arguments, (into, others))
