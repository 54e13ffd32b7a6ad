"""Matrices times vectors, as the linear maps of a model need it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class PlannedProduct:
    """vectors [count, columns] -> vectors @ matrix.T of each matrix, side by side: a new array [count, rows],
    all float32, by cuBLAS.

    matrices: [rows, columns] each, which stay where they are. CuPy multiplies in full float32 unless
    ``CUPY_TF32=1`` stands in the environment. Other counts of vectors may have other bits: cuBLAS chooses
    by the shape.
    """

    def __init__(self, matrices: Sequence[Any], namespace: Any) -> None:
        self._transposed = [matrix.T for matrix in matrices]
        self._concatenate = namespace.concatenate

    def __call__(self, vectors: Any) -> Any:
        made = [vectors @ matrix for matrix in self._transposed]
        return made[0] if len(made) == 1 else self._concatenate(made, axis=1)
