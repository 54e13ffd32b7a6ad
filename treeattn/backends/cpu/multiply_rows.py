"""Matrices times a few vectors, as a decoded token needs it: the compiled kernel, or NumPy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from treeattn.backends.cpu import compile
from treeattn.backends.cpu.attention import process_threads
from treeattn.backends.cpu.blocked import wide
from treeattn.backends.cpu.records import address
from treeattn.errors import BackendError
from treeattn.partial import Array

#: From so many vectors on a matrix product is bound by arithmetic, which NumPy's library does better.
MOST = 16

#: The types that the kernel reads, by its numbers.
_TYPES = {np.dtype(name): at for name, at in (("f4", 0), ("f2", 1), (ml_dtypes.bfloat16, 2))}
_SPARE = 32  # numbers by which the kernel fills a vector up, at most
_WIDENED = 1 << 20  # elements that are widened at once for NumPy


class _Matrix(ctypes.Structure):
    """struct matrix of kernels/cpu/multiply_rows.c."""

    _fields_ = (("elements", ctypes.c_void_p), ("rows", ctypes.c_int64))


class PlannedProduct:
    """vectors [count, columns] -> vectors @ matrix.T of each matrix, side by side: a new array [count, rows].

    matrices: [rows, columns] each, float32, float16 or bfloat16, read where they are; vectors and
    results are float32. Up to 16 vectors an output has the same bits however many come together, where there
    is a compiler and the matrices are C-contiguous and of one type; with `one_order` any number of vectors,
    by 16 at a time.

    Raises `ArgumentError` where ``TREEATTN_THREADS`` is no number of threads, `BackendError` for `one_order`
    where the kernel does not serve.
    """

    def __init__(self, matrices: Sequence[Array], one_order: bool = False) -> None:
        self._matrices, self._threads = matrices, ctypes.c_int64(process_threads())
        self._columns, self._rows = matrices[0].shape[1], sum(map(len, matrices))
        compiled, type_ = compile.loaded()[0], _TYPES.get(matrices[0].dtype)
        fits = all(one.flags.c_contiguous and one.dtype == matrices[0].dtype for one in matrices)
        self._call = compiled.multiply_rows if compiled is not None and fits and type_ is not None else None
        self._one_order = one_order
        if one_order and self._call is None:
            raise BackendError("sums in one order need a compiler, and matrices of one type in a row")
        self._reserve(1)
        if self._call is not None and type_ is not None:
            rows = [_Matrix(address(one), len(one)) for one in matrices]
            self._structs = (_Matrix * len(rows))(*rows)
            numbers = (len(rows), self._columns, type_)
            self._planned = (self._structs, *map(ctypes.c_int64, numbers))

    def __call__(self, vectors: Array) -> Array:
        count = len(vectors)
        fits = vectors.shape[1:] == (self._columns,)  # the kernel would read on; NumPy raises
        if self._call is None or not fits or not 0 < count <= MOST:
            if self._one_order and count > MOST:
                return np.concatenate([self(vectors[at : at + MOST]) for at in range(0, count, MOST)])
            return self._by_library(vectors)
        vectors = np.ascontiguousarray(vectors, np.float32)
        out = np.empty((count, self._rows), np.float32)
        if len(self._work) <= count:
            self._reserve(count)
        ends = self._work_address, ctypes.c_void_p(address(out))
        given = ctypes.c_void_p(address(vectors)), ctypes.c_int64(count)
        self._call(*self._planned, *given, *ends, self._threads)
        return out

    def _reserve(self, count: int) -> None:
        """Room for so many vectors and for the way to the next line."""
        self._work = np.empty((count + 1, self._columns + _SPARE), np.float32)
        self._work_address = ctypes.c_void_p(address(self._work))

    def _by_library(self, vectors: Array) -> Array:
        """Multiply by NumPy, some rows at a time where they have to be widened for it."""
        only = self._matrices[0]
        if len(self._matrices) == 1 and only.dtype == np.float32:
            return np.asarray(vectors @ only.T)
        out, at = np.empty((len(vectors), self._rows), np.float32), 0
        step = max(1, _WIDENED // max(1, self._columns))
        for matrix in self._matrices:
            for begin in range(0, len(matrix), step):
                some = wide(matrix[begin : begin + step], np.float32)
                np.matmul(vectors, some.T, out=out[:, at : at + len(some)])
                at += len(some)
        return out
