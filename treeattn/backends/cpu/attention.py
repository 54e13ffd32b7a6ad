"""Partial attention on the processor: the compiled kernel, or NumPy.

Environment, read here:

- ``TREEATTN_THREADS``: threads of one process for attention, default 1.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence

import numpy as np

from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.pages import CheckedTable, as_table
from treeattn.attention.shape import CACHE_DTYPES, FLOAT8
from treeattn.backends.cpu import arguments, bins, blocked, compile
from treeattn.backends.cpu.arguments import Binding, planned_binding
from treeattn.backends.cpu.tables import PlannedTables
from treeattn.errors import ArgumentError, RestrictionError
from treeattn.partial import Array

#: Threads that a process may have for attention; kernels/cpu/thread_pool.h has the same number.
MAX_THREADS = 256

#: enum order of kernels/cpu/attention_state.h: tokens of a block far apart in memory, or side by side.
ORDERS = ("scattered", "neighbours")


_SIZES = ("batch", "queries", "heads", "kv_heads", "head_dim", "v_dim", "tokens")


class _Arguments(ctypes.Structure):
    """struct attention of kernels/cpu/partial_attention.h."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("q", "k", "v", "records", "lengths", "workspace")]
        + [(name, ctypes.c_int64) for name in _SIZES]
        + [(f"q_{axis}_stride", ctypes.c_int64) for axis in ("batch", "query", "head")]
        + [(f"k_{axis}_stride", ctypes.c_int64) for axis in ("batch", "token", "head")]
        + [(f"v_{axis}_stride", ctypes.c_int64) for axis in ("batch", "token", "head")]
        + [("scale", ctypes.c_float)]
        + [(name, ctypes.c_int32) for name in ("q_type", "kv_type", "threads", "order", "reproducible")]
        + [(name, ctypes.c_void_p) for name in ("visible", "k_scale", "v_scale", "block_table")]
        + [(name, ctypes.c_int64) for name in ("pages", "page_size")]
    )


class PlannedAttention:
    """Writes the records of every query head attending to this process's tokens, where they stay.

    A call takes q [batch, queries, heads, head_dim] and k, v [batch, tokens, kv_heads, head_dim and v_dim],
    of any strides but a contiguous last axis: float32, float16, bfloat16 or uint16 (its bits), float64, and k
    and v also of 8 bits. Head h reads KV head h // (heads // kv_heads). lengths: [batch] integers, the valid
    tokens; None: all; what lies beyond is never read. block_table: integers [batch, pages of a sequence], -1
    for none; k and v are then [pages, page_size, ..], and lengths are needed, if not in `tables`. Raises
    `ArgumentError`.

    Calling it with the arrays of the last call (the same objects) derives nothing again; a block table is
    looked at where it changed. It keeps references to them and to its workspace until the next call.
    """

    def __init__(
        self,
        records: Array,
        *,
        scale: float,
        threads: int | None = None,
        order: str | None = None,
        tables: MaskTables | None = None,
        kv_dtype: str | None = None,
        k_scale: Sequence[float] | None = None,
        v_scale: Sequence[float] | None = None,
        most_tokens: int | None = None,
        whole_blocks: bool = False,
    ) -> None:
        """records: C-contiguous [batch, heads, queries, v_dim + 2], float32; float64 for inputs of it; or
        those of `treeattn.bins`, int64. scale: factor of the logits.

        tables: its tables are filled before each call, for the arrays of that; lengths are in them.
        threads: how many of this process compute; default ``TREEATTN_THREADS``. order: one of `ORDERS`;
        default `read_order`. Both orders are exact; their last bits differ. k_scale, v_scale: [kv_heads],
        what elements of k and v are multiplied with, as those of 8 bits need; None is 1. kv_dtype: what
        arrays of uint8 carry. most_tokens: of a shard, where more are refused.
        whole_blocks: bits depend on blocks of 32 tokens, too.
        """
        arguments.check_records(records)
        self._most_tokens = most_tokens or _ANY
        self._records = records
        self._scale = float(scale)
        self._bound: tuple[Array, Array, Array, Array | None] | None = None
        self._pages: CheckedTable | None = None
        self._lengths: Array | None = None
        self._mask = tables
        self._bits = CACHE_DTYPES[kv_dtype] if kv_dtype in FLOAT8 else None
        self._scales = _scales(k_scale), _scales(v_scale)
        self._workspace = np.empty(0, np.uint8)
        compiled = compile.loaded()[0]
        self._kernels = None if records.dtype == np.float64 else compiled
        self._arguments = _Arguments(
            records=arguments.address(records),
            scale=self._scale,
            threads=threads or process_threads(),
            order=ORDERS.index(order or read_order()),
            reproducible=(records.dtype == np.int64) * (2 if whole_blocks else 1),
        )
        self._tables = None if tables is None or self._kernels is None else PlannedTables(tables)
        if self._tables is not None:
            self._arguments.visible = self._tables.address
        self._arguments.k_scale, self._arguments.v_scale = (
            None if one is None else arguments.address(one) for one in self._scales
        )
        self._pointer = ctypes.byref(self._arguments)
        self._binding = Binding(attention=ctypes.addressof(self._arguments))
        if self._kernels is not None:
            self._rebind = planned_binding(self._kernels, self._binding)

    @property
    def compiled(self) -> bool:
        return self._kernels is not None

    @property
    def address(self) -> int:
        """Of the struct attention that the compiled kernel takes; `takes` keeps it up to date."""
        return ctypes.addressof(self._arguments)

    def takes(self, q: Array, k: Array, v: Array, lengths: Array | None) -> bool:
        """Whether the compiled kernel can now run on these arrays: those of the last call, or others that
        differ from them in place, strides and tokens alone. Else they are for a call, which looks closer."""
        bound = self._bound
        if bound is None or bound[3] is not None:
            return False
        if self._tables is not None:
            self._tables.follow()
            lengths = None
            if self._torn():
                return False
        if bound[0] is q and bound[1] is k and bound[2] is v and lengths is self._lengths:
            return True
        if not (
            type(q) is type(k) is type(v) is np.ndarray
            and q.dtype is bound[0].dtype
            and k.dtype is v.dtype is bound[1].dtype
            and (lengths is None or (type(lengths) is np.ndarray and lengths.dtype is _INT64))
        ):
            return False
        self._bound = None  # until it is done: a signal may come in between
        if k.shape[1] > self._most_tokens or self._rebind((q, k, v, lengths)):
            return False
        self._lengths = lengths
        self._bound = (q, k, v, None)
        return True

    def __call__(
        self, q: Array, k: Array, v: Array, lengths: Array | None = None, block_table: Array | None = None
    ) -> None:
        bound = self._bound
        if block_table is not None and (bound is None or bound[3] is not block_table):
            block_table = as_table(block_table, q.shape[0])
        same = bound is not None and bound[0] is q and bound[1] is k and bound[2] is v
        if bound is None or not same or (bound[3] is None) != (block_table is None):
            self._bind(q, k, v, block_table)
        elif bound[3] is not block_table:
            self._bind_table(k, block_table)
            self._bound = q, k, v, block_table
        tokens = k.shape[1] if block_table is None else k.shape[1] * block_table.shape[1]
        check_tokens(tokens, self._most_tokens)
        if self._tables is not None:
            self._tables.follow()
            lengths = None
            if self._torn():
                raise RestrictionError(
                    "a mask is of draft tokens, which are dealt out one by one: plan reproducible='tokens'"
                )
        if bound is None or lengths is not self._lengths:
            lengths = self._bind_lengths(lengths, q)
        if block_table is not None:
            self._pages = self._pages or CheckedTable()
            self._pages.check(block_table, k.shape[:2], lengths, self._mask)
        if self._kernels is None:
            arguments.check_lengths(lengths, tokens)
            if k.dtype == np.uint8 and self._bits is not None:
                k, v = k.view(self._bits), v.view(self._bits)
            attend: Callable[..., None] = blocked.partial_attention
            if self._arguments.reproducible:
                attend = functools.partial(bins.attend, whole_blocks=self._arguments.reproducible == 2)
            attend(
                *(q, k, v, self._records),
                *self._scales,
                scale=self._scale,
                lengths=lengths,
                tables=self._mask,
                block_table=block_table,
            )
        elif row := self._kernels.partial_attention(self._pointer):
            arguments.check_lengths(lengths, tokens)
            raise ArgumentError(
                f"sequence {row - 1} sees tokens beyond the {tokens} of these arrays: look at them first"
            )

    def _torn(self) -> bool:
        """Whether there may be parts of blocks on other ranks."""
        return self._arguments.reproducible == 2 and self._mask is not None and self._mask.drafts > 0

    def _bind(self, q: Array, k: Array, v: Array, block_table: Array | None) -> None:
        self._bound = None
        paged = block_table is not None
        types = arguments.check_inputs(q, k, v, self._records, self._bits, paged=paged)
        for scales in self._scales:
            if scales is not None and scales.shape != k.shape[2:3]:
                raise ArgumentError(f"{len(scales)} scales for {k.shape[2]} KV heads: one for each is needed")
        if self._kernels is not None:
            a = self._arguments
            a.q, a.k, a.v = arguments.address(q), arguments.address(k), arguments.address(v)
            a.batch, a.queries, a.heads, a.head_dim = q.shape
            a.v_dim = v.shape[3]
            a.tokens, a.kv_heads = k.shape[1:3]
            a.q_batch_stride, a.q_query_stride, a.q_head_stride = q.strides[:3]
            a.k_batch_stride, a.k_token_stride, a.k_head_stride = k.strides[:3]
            a.v_batch_stride, a.v_token_stride, a.v_head_stride = v.strides[:3]
            a.q_type, a.kv_type = types
            self._bind_table(k, block_table)
        self._bound = (q, k, v, block_table)

    def _bind_table(self, k: Array, block_table: Array | None) -> None:
        if self._kernels is None:
            return
        a = self._arguments
        a.block_table = None
        if block_table is not None:
            a.block_table, a.page_size = arguments.address(block_table), k.shape[1]
            a.pages = block_table.shape[1]
            a.tokens = a.pages * a.page_size
        self._reserve(self._kernels.attention_workspace(self._pointer))

    def _bind_lengths(self, lengths: Array | None, q: Array) -> Array | None:
        self._lengths = None
        self._arguments.lengths = None
        if lengths is None:
            return None
        lengths = np.ascontiguousarray(lengths, np.int64)
        if lengths.shape != q.shape[:1]:
            raise ArgumentError(f"lengths has shape {lengths.shape}: one for each of {q.shape[0]} batch rows")
        self._arguments.lengths = arguments.address(lengths)
        # Perhaps a converted copy, which no argument ever is: it is made anew in the next call.
        self._lengths = lengths
        return lengths

    def _reserve(self, size: int) -> None:
        if self._workspace.nbytes < size + _ALIGNMENT:
            self._workspace = np.empty(size + size // 8 + _ALIGNMENT, np.uint8)
            start = arguments.address(self._workspace)
            self._arguments.workspace = start + -start % _ALIGNMENT
            self._binding.workspace = self._workspace.nbytes - _ALIGNMENT


def check_tokens(tokens: int, most: int) -> None:
    """Raise `ArgumentError` for a shard of more."""
    if tokens > most:
        raise ArgumentError(
            f"a shard of {tokens} tokens: reproducible= takes at most {most} on each of so many ranks, that "
            "64 bits hold the sums: use more ranks, or leave it out"
        )


def _scales(given: Sequence[float] | None) -> Array | None:
    return None if given is None else np.array(given, np.float32)


_ALIGNMENT = 64
_INT64 = np.dtype(np.int64)
_ANY = 1 << 62


def check_environment() -> None:
    """Raise `ArgumentError` for settings that cannot be used, before anything is planned with them."""
    process_threads()


def read_order() -> str:
    """In which order this processor is given the cache to read, by its maker.

    AMD's cores follow few streams of memory at once: 32 are read at a third of the rate of one there, where
    Intel's read 32 faster than one. Other makers: nobody has measured.
    """
    return "neighbours" if compile.processor_vendor() == "AuthenticAMD" else "scattered"


def process_threads() -> int:
    text = os.environ.get("TREEATTN_THREADS", "1")
    if not text.isdecimal() or not 1 <= int(text) <= MAX_THREADS:
        raise ArgumentError(f"TREEATTN_THREADS={text}: a number of threads, from 1 to {MAX_THREADS}")
    return int(text)
