"""A matrix times a few vectors, as a decoded token needs it: the compiled kernel, or NumPy."""

from __future__ import annotations

import ctypes

import numpy as np

from treeattn.backends.cpu import compile
from treeattn.backends.cpu.arguments import Array, address
from treeattn.backends.cpu.attention import process_threads

__all__ = ["PlannedProduct"]

#: From so many vectors on a matrix product is bound by arithmetic, which NumPy's library does better.
MOST = 16


class PlannedProduct:
    """vectors [count, columns] -> vectors @ matrix.T [count, rows], a new array, all float32.

    matrix: [rows, columns], which stays where it is. Up to 16 vectors an output has the same bits however
    many of them come together, where there is a compiler and the matrix is C-contiguous.

    Raises `ArgumentError` where ``TREEATTN_THREADS`` is no number of threads.
    """

    def __init__(self, matrix: Array) -> None:
        self._matrix, self._threads = matrix, ctypes.c_int64(process_threads())
        compiled = compile.loaded()[0]
        fits = matrix.flags.c_contiguous and matrix.dtype == np.float32
        self._call = compiled.multiply_rows if compiled is not None and fits else None
        if self._call is not None:
            self._address = ctypes.c_void_p(address(matrix))
            self._shape = [ctypes.c_int64(n) for n in matrix.shape]

    def __call__(self, vectors: Array) -> Array:
        fits = vectors.shape[1:] == self._matrix.shape[1:]  # the kernel would read on; NumPy raises
        if self._call is None or not fits or not 0 < len(vectors) <= MOST:
            return np.asarray(vectors @ self._matrix.T)
        vectors = np.ascontiguousarray(vectors, np.float32)
        out = np.empty((len(vectors), len(self._matrix)), np.float32)
        ends = ctypes.c_void_p(address(vectors)), ctypes.c_void_p(address(out))
        self._call(self._address, *ends, *self._shape, ctypes.c_int64(len(vectors)), self._threads)
        return out
