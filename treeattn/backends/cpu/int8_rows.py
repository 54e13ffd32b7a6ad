"""Matrices of int8 with a scale for each row: half the bytes of 16-bit ones, for a loss that is measured."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from treeattn.errors import ArgumentError
from treeattn.partial import Array

#: Elements that are widened at once.
WIDENED = 1 << 20


class Int8Rows:
    """A matrix [rows, columns] as int8 ``values`` and float32 ``scales`` [rows]: row r is
    values[r] * scales[r]. Indexed like an array it gives these rows in float32.
    """

    dtype = np.dtype(np.int8)

    def __init__(self, values: Array, scales: Array) -> None:
        self.values, self.scales = values, scales

    @classmethod
    def rounded(cls, matrix: Array) -> Int8Rows:
        """Each number of a matrix to the nearest of 255 that its row has, the largest of which is the row's.
        Raises `ArgumentError` for infinities and NaN."""
        made = cls(np.empty(matrix.shape, np.int8), np.empty(len(matrix), np.float32))
        step = max(1, WIDENED // max(1, matrix.shape[1]))
        for rows in (slice(begin, begin + step) for begin in range(0, len(matrix), step)):
            some = widened(matrix[rows])
            scales = np.abs(some).max(axis=1, initial=0) / np.float32(127)
            if not np.isfinite(scales).all():
                raise ArgumentError("int8 weights: a matrix has infinities or NaN: keep the type that it has")
            made.scales[rows] = scales
            made.values[rows] = np.rint(some / np.where(scales > 0, scales, 1)[:, None])
        return made

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: Any) -> Array:
        wide: Array = self.values[rows] * self.scales[rows, None]
        return wide


def widened(matrix: Array | Int8Rows) -> Array:
    """As float32, the same values."""
    if (
        not isinstance(matrix, Int8Rows) and matrix.dtype == ml_dtypes.bfloat16
    ):  # several times as fast as a cast
        bits = matrix.view(np.uint16).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return np.asarray(matrix[:], np.float32)
