"""A matrix times vectors, as the linear maps of a model need it."""

from __future__ import annotations

from typing import Any

__all__ = ["PlannedProduct"]


class PlannedProduct:
    """vectors [count, columns] -> vectors @ matrix.T [count, rows], a new array, all float32, by cuBLAS.

    matrix: [rows, columns], which stays where it is. CuPy multiplies in full float32 unless ``CUPY_TF32=1``
    stands in the environment. Other counts of vectors may have other bits: cuBLAS chooses by the shape.
    """

    def __init__(self, matrix: Any) -> None:
        self._transposed = matrix.T

    def __call__(self, vectors: Any) -> Any:
        return vectors @ self._transposed
