"""Attention on the processor: compiled C kernels, or NumPy where there is no compiler.

The three verbs of a backend (`partial_attention`, `merge`, `finish`) check their arguments on every
call. `PlannedAttention`, `planned_finish` and `MergeOperator.planned_merge` check once and keep
pointers, for a decoder's step. Records are described in `treeattn.partial`.

Environment: ``TREEATTN_THREADS``, threads of one process for attention, default 1, is read here.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from treeattn import partial
from treeattn.backends import arguments, blocked, compile
from treeattn.errors import ArgumentError, BackendError

__all__ = [
    "MergeOperator",
    "PlannedAttention",
    "check_environment",
    "compiled_kernels",
    "compiled_kernels_problem",
    "finish",
    "merge",
    "partial_attention",
    "planned_finish",
]

Array = np.ndarray[Any, np.dtype[Any]]


class _Arguments(ctypes.Structure):
    """struct attention of kernels/cpu/partial_attention.h."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("q", "k", "v", "records", "lengths", "workspace")]
        + [(name, ctypes.c_int64) for name in ("batch", "queries", "heads", "kv_heads", "head_dim", "tokens")]
        + [(f"q_{axis}_stride", ctypes.c_int64) for axis in ("batch", "query", "head")]
        + [(f"k_{axis}_stride", ctypes.c_int64) for axis in ("batch", "token", "head")]
        + [(f"v_{axis}_stride", ctypes.c_int64) for axis in ("batch", "token", "head")]
        + [("scale", ctypes.c_float)]
        + [(name, ctypes.c_int32) for name in ("q_type", "kv_type", "threads")]
    )


def compiled_kernels_problem() -> str | None:
    """Why the compiled kernels cannot be used here, in one line; None where they can.

    Everything here works without them, several times slower and without a warning: the caller
    knows whether to say so, and once for all ranks.

    Raises:
        ArgumentError: ``TREEATTN_ISA`` asks for what this processor lacks, or ``TREEATTN_CACHE`` cannot
            be written.
    """
    return _kernels()[1]


def compiled_kernels() -> ctypes.CDLL | None:
    """The compiled kernels; None where they cannot be used."""
    return _kernels()[0]


def partial_attention(
    q: Array, k: Array, v: Array, records: Array, *, scale: float, lengths: Array | None = None
) -> None:
    """Write the records of every query head attending to this process's tokens.

    Args:
        q: [batch, queries, heads, head_dim].
        k, v: [batch, tokens, kv_heads, head_dim], any strides but a contiguous last axis; tokens may
            be 0. heads is a multiple of kv_heads: head h reads KV head h // (heads // kv_heads).
        records: written, C-contiguous [batch, heads, queries, head_dim + 2], float32; float64 when
            an input is float64.
        scale: factor of the logits, usually 1 / sqrt(head_dim).
        lengths: [batch] integers in 0..tokens, the valid tokens; None means all. What lies beyond
            is never read.

    Inputs are float32, float16, bfloat16 or uint16 (the bits of bfloat16), or float64.

    Raises:
        ArgumentError: shapes, types, strides or lengths that cannot be.
    """
    PlannedAttention(records, scale=scale)(q, k, v, lengths)


class PlannedAttention:
    """`partial_attention` into records that stay where they are.

    Calling it with the arrays of the last call (the same objects) derives nothing again. It keeps
    references to them and to its workspace until the next call.
    """

    def __init__(self, records: Array, *, scale: float, threads: int | None = None) -> None:
        """Plan for `records` and `scale` as in `partial_attention`.

        threads: how many of this process compute; default ``TREEATTN_THREADS``.
        """
        arguments.check_records(records)
        self._records = records
        self._scale = float(scale)
        self._bound: tuple[Array, Array, Array] | None = None
        self._lengths: Array | None = None
        self._workspace = np.empty(0, np.uint8)
        kernels = _kernels()[0]
        self._kernels = kernels if records.dtype == np.float32 else None
        self._arguments = _Arguments(
            records=arguments.address(records), scale=self._scale, threads=threads or _threads()
        )
        self._pointer = ctypes.byref(self._arguments)

    def __call__(self, q: Array, k: Array, v: Array, lengths: Array | None = None) -> None:
        """As `partial_attention`."""
        bound = self._bound
        if bound is None or bound[0] is not q or bound[1] is not k or bound[2] is not v:
            self._bind(q, k, v)
        if lengths is not self._lengths:
            lengths = self._bind_lengths(lengths, k)
        if self._kernels is None:
            arguments.check_lengths(lengths, k.shape[1])
            blocked.partial_attention(q, k, v, self._records, scale=self._scale, lengths=lengths)
        elif self._kernels.partial_attention(self._pointer):
            arguments.check_lengths(lengths, k.shape[1])

    def _bind(self, q: Array, k: Array, v: Array) -> None:
        self._bound = None
        types = arguments.check_inputs(q, k, v, self._records)
        if self._kernels is not None:
            a = self._arguments
            a.q, a.k, a.v = arguments.address(q), arguments.address(k), arguments.address(v)
            a.batch, a.queries, a.heads, a.head_dim = q.shape
            a.tokens, a.kv_heads = k.shape[1:3]
            a.q_batch_stride, a.q_query_stride, a.q_head_stride = q.strides[:3]
            a.k_batch_stride, a.k_token_stride, a.k_head_stride = k.strides[:3]
            a.v_batch_stride, a.v_token_stride, a.v_head_stride = v.strides[:3]
            a.q_type, a.kv_type = types
            self._reserve(self._kernels.attention_workspace(self._pointer))
        self._bound = (q, k, v)

    def _bind_lengths(self, lengths: Array | None, k: Array) -> Array | None:
        self._lengths = None
        self._arguments.lengths = None
        if lengths is None:
            return None
        lengths = np.ascontiguousarray(lengths, np.int64)
        if lengths.shape != k.shape[:1]:
            raise ArgumentError(f"lengths has shape {lengths.shape}: one for each of {k.shape[0]} batch rows")
        self._arguments.lengths = arguments.address(lengths)
        # Perhaps a converted copy, which no argument ever is: it is made anew in the next call.
        self._lengths = lengths
        return lengths

    def _reserve(self, size: int) -> None:
        if self._workspace.nbytes < size + _ALIGNMENT:
            self._workspace = np.empty(size + size // 8 + _ALIGNMENT, np.uint8)
            start = arguments.address(self._workspace)
            self._arguments.workspace = start + -start % _ALIGNMENT


_ALIGNMENT = 64


def merge(into: Array, other: Array) -> None:
    """Fold `other` into `into`, in place: records [..., head_dim + 2] of one shape and type.

    Raises:
        ArgumentError: they differ in shape or type, or are not C-contiguous.
    """
    arguments.check_merge(into, other)
    MergeOperator(into.shape[-1] - partial.EXTRA, into.dtype).planned_merge(into, other)()


def finish(records: Array, out: Array, lse: Array) -> None:
    """Turn records into attention output, as `treeattn.partial.finish` defines it, to the bit.

    Args:
        records: [batch, heads, queries, head_dim + 2].
        out: written, [batch, queries, heads, head_dim].
        lse: written, [batch, heads, queries]. All C-contiguous and of one type.

    Raises:
        ArgumentError: shapes, types or strides that do not fit.
    """
    planned_finish(records, out, lse)()


def planned_finish(records: Array, out: Array, lse: Array) -> Callable[[], object]:
    """`finish` for arrays that never move: a call without arguments and without checks."""
    arguments.check_records(records)
    batch, heads, queries, width = records.shape
    arguments.check_output("out", out, (batch, queries, heads, width - partial.EXTRA), records)
    arguments.check_output("lse", lse, (batch, heads, queries), records)
    kernels = _kernels()[0]
    if kernels is None or records.dtype != np.float32:
        return functools.partial(partial.finish, records, out, lse)
    shape = (ctypes.c_int64(size) for size in records.shape)
    return _keep(
        functools.partial(kernels.finish, _pointer(records), _pointer(out), _pointer(lse), *shape),
        records,
        out,
        lse,
    )


class MergeOperator:
    """How records of one head dimension and type merge: a `treeattn.collectives.operator.Operator`."""

    def __init__(self, head_dim: int, dtype: Any = np.float32) -> None:
        """For records of `head_dim` + 2 elements of `dtype`, float32 or float64."""
        self._width = head_dim + partial.EXTRA
        self._dtype: np.dtype[Any] = np.dtype(dtype)
        if self._dtype not in (np.float32, np.float64):
            raise ArgumentError(f"records are float32 or float64, not {self._dtype}")

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of a record."""
        return self._dtype

    @property
    def width(self) -> int:
        """Elements of one record: head_dim + 2."""
        return self._width

    def merge(self, into: Array, other: Array) -> None:
        """Fold `other` into `into`, in place; both C-contiguous [records, width]."""
        arguments.check_merge(into, other)
        self.planned_merge(into, other)()

    def planned_merge(self, into: Array, other: Array) -> Callable[[], object]:
        """`merge` for two arrays that never move: a call without arguments and without checks."""
        kernels = _kernels()[0]
        if kernels is None or self._dtype != np.float32:
            return functools.partial(partial.merge, into, other)
        count, width = ctypes.c_int64(into.size // self._width), ctypes.c_int64(self._width)
        return _keep(
            functools.partial(kernels.merge_partials, _pointer(into), _pointer(other), count, width),
            into,
            other,
        )

    def mpi_function(self) -> int:
        """Address of the merge as an MPI_User_function; it lives as long as the process.

        Raises:
            BackendError: there is no compiled merge for these records (float64, or no compiler).
        """
        kernels, problem = _kernels()
        if kernels is None or self._dtype != np.float32:
            raise BackendError(
                f"no compiled merge of {self._dtype} records ({problem or 'only float32 has one'}), which "
                "mpi_allreduce needs: take a scheme with a schedule, such as recursive_doubling"
            )
        address: int | None = kernels.mpi_operator(ctypes.c_int64(self._width - partial.EXTRA))
        if address is None:
            raise BackendError(f"no compiled MPI operator for head_dim {self._width - partial.EXTRA}")
        return address


def _kernels() -> tuple[ctypes.CDLL | None, str | None]:
    """The compiled kernels, or why there are none."""
    return _load(compile.chosen_isa())


@functools.cache
def _load(isa: str) -> tuple[ctypes.CDLL | None, str | None]:
    try:
        kernels = compile.library(isa)
    except BackendError as error:
        return None, str(error)
    kernels.partial_attention.restype = ctypes.c_int64
    kernels.attention_workspace.restype = ctypes.c_int64
    kernels.merge_partials.restype = None
    kernels.finish.restype = None
    kernels.rescale_records.restype = None
    kernels.mpi_operator.restype = ctypes.c_void_p
    return kernels, None


def check_environment() -> None:
    """Raise `ArgumentError` for settings that cannot be used, before anything is planned with them."""
    _threads()


def _threads() -> int:
    text = os.environ.get("TREEATTN_THREADS", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(f"TREEATTN_THREADS={text}: a number of threads, at least 1")
    return int(text)


def _pointer(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(arguments.address(array))


def _keep(call: functools.partial[Any], *arrays: Array) -> functools.partial[Any]:
    """`call` with the arrays whose addresses it holds tied to its life."""
    call.arrays = arrays  # type: ignore[attr-defined]
    return call
