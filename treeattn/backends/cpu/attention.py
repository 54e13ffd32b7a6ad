"""Partial attention on the processor: the compiled kernel, or NumPy.

Environment, read here:

- ``TREEATTN_THREADS``: threads of one process for attention, default 1.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.pages import CheckedTable, as_table
from treeattn.attention.shape import CACHE_DTYPES, FLOAT8
from treeattn.backends.cpu import bins, blocked, compile
from treeattn.backends.cpu.records import address, check_records, code_address
from treeattn.backends.cpu.tables import PlannedTables
from treeattn.errors import ArgumentError, RestrictionError
from treeattn.partial import Array

#: Threads that a process may have for attention; kernels/cpu/thread_pool.h has the same number.
MAX_THREADS = 256

#: enum way of kernels/cpu/attention_state.h: how a cache is read, as one stream or from four places in turn,
#: where lines are asked for ahead or not.
WAYS = ("one stream", "in turn", "in turn, ahead")

# enum element_type of kernels/cpu/simd.h. uint16 stands for the bits of bfloat16.
_ELEMENT_TYPES = {
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 1,
    np.dtype(ml_dtypes.bfloat16): 2,
    np.dtype(np.uint16): 2,
    np.dtype(ml_dtypes.float8_e4m3fn): 3,
    np.dtype(ml_dtypes.float8_e5m2): 4,
}
_CACHES_ONLY = (3, 4)
_ALIGNMENT = 64
_INT64 = np.dtype(np.int64)
_ANY = 1 << 62


class _Arguments(ctypes.Structure):
    """struct attention of kernels/cpu/partial_attention.h. Strides: of batch, query or token, and head."""

    _sizes = ("batch", "queries", "heads", "kv_heads", "head_dim", "v_dim", "tokens")
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("q", "k", "v", "records", "lengths", "workspace")]
        + [(name, ctypes.c_int64) for name in _sizes]
        + [(f"{name}_strides", ctypes.c_int64 * 3) for name in "qkv"]
        + [("scale", ctypes.c_float)]
        + [(name, ctypes.c_int32) for name in ("q_type", "kv_type", "threads", "way", "reproducible")]
        + [(name, ctypes.c_void_p) for name in ("visible", "k_scale", "v_scale", "block_table")]
        + [(name, ctypes.c_int64) for name in ("pages", "page_size")]
    )


# The interpreter's lock is kept: its objects are asked.
_BIND = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.py_object)


class _Binding(ctypes.Structure):
    """struct binding of kernels/cpu/bind_arrays.c: new arrays in the place of the last ones, without Python
    code for each. workspace: bytes that `attention` has."""

    _functions = ("item", "attribute", "pointer", "release")
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _functions),
        ("name", ctypes.py_object),
        ("none", ctypes.py_object),
        ("attention", ctypes.c_void_p),
        ("workspace", ctypes.c_int64),
    )

    def call(self, kernels: Any) -> Callable[[tuple[Any, ...]], int]:
        """Called with (q, k, v, lengths), binds them and gives 0 where that is so easy; else changes
        nothing."""
        python = ctypes.pythonapi
        calls = (python.PyTuple_GetItem, python.PyObject_GetAttr, python.PyCapsule_GetPointer)
        for name, function in zip(self._functions, (*calls, python.Py_DecRef), strict=True):
            setattr(self, name, code_address(function))
        self.name, self.none = "__array_struct__", None
        bind = _BIND(code_address(kernels.bind_arrays))
        return functools.partial(bind, ctypes.c_void_p(ctypes.addressof(self)))


class PlannedAttention:
    """Writes the records of every query head attending to this process's tokens, where they stay.

    A call takes q [batch, queries, heads, head_dim] and k, v [batch, tokens, kv_heads, head_dim and v_dim],
    of any strides but a contiguous last axis: float32, float16, bfloat16 or uint16 (its bits), float64, and k
    and v also of 8 bits. Head h reads KV head h // (heads // kv_heads). lengths: [batch] integers, the valid
    tokens; None: all; what lies beyond is never read. block_table: integers [batch, pages of a sequence], -1
    for none; k and v are then [pages, page_size, ..], and lengths are needed, if not in `tables`. Shapes
    are the caller's to check, as `Device.check` does; other things that do not fit raise `ArgumentError`.

    Calling it with the arrays of the last call (the same objects) derives nothing again; a block table is
    looked at where it changed. It keeps references to them and to its workspace until the next call.
    """

    def __init__(
        self,
        records: Array,
        *,
        scale: float,
        threads: int | None = None,
        way: str | None = None,
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
        threads: how many of this process compute; default ``TREEATTN_THREADS``. way: one of `WAYS`, by
        default `fastest_way`; bits are the same. k_scale, v_scale: [kv_heads], what elements of k and v are
        multiplied with, as those of 8 bits need; None is 1. kv_dtype: what arrays of uint8 carry.
        most_tokens: of a shard, where more are refused.
        whole_blocks: bits depend on blocks of 32 tokens, too.
        """
        check_records(records)
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
            records=address(records),
            scale=self._scale,
            threads=threads or process_threads(),
            way=WAYS.index(way or (fastest_way() if compiled and records.dtype == np.float32 else WAYS[0])),
            reproducible=(records.dtype == np.int64) * (2 if whole_blocks else 1),
        )
        self._tables = None if tables is None or self._kernels is None else PlannedTables(tables)
        if self._tables is not None:
            self._arguments.visible = self._tables.address
        self._arguments.k_scale, self._arguments.v_scale = (
            None if one is None else address(one) for one in self._scales
        )
        self._pointer = ctypes.byref(self._arguments)
        self._binding = _Binding(attention=ctypes.addressof(self._arguments))
        self._rebind: Any = None  # made in the first step that brings other arrays

    @property
    def compiled(self) -> bool:
        return self._kernels is not None

    @property
    def address(self) -> int:
        """The address of the struct attention that the compiled kernel takes; `takes` keeps it up to date."""
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
        self._rebind = self._rebind or self._binding.call(self._kernels)
        if self._rebind((q, k, v, lengths)) or k.shape[1] > self._most_tokens:
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
        if self._tables is not None:
            self._tables.follow()
            lengths = None
            if self._torn():
                raise RestrictionError(
                    "a mask is of draft tokens, which are dealt out one by one: plan reproducible='tokens'"
                )
        if bound is None or any(map(operator.is_not, bound, (q, k, v, block_table))):
            self._bind(q, k, v, block_table)
            lengths = self._bind_lengths(lengths, q)
        elif lengths is not self._lengths:
            lengths = self._bind_lengths(lengths, q)
        if block_table is not None:
            self._pages = self._pages or CheckedTable()
            self._pages.check(block_table, k.shape[:2], lengths, self._mask)
        if self._kernels is None:
            self._attend_by_numpy(q, k, v, lengths, block_table)
        elif row := self._kernels.partial_attention(self._pointer):
            tokens = int(self._arguments.tokens)
            _check_lengths(lengths, tokens)
            raise ArgumentError(
                f"sequence {row - 1} sees tokens beyond the {tokens} of these arrays: look at them first"
            )

    def _attend_by_numpy(
        self, q: Array, k: Array, v: Array, lengths: Array | None, block_table: Array | None
    ) -> None:
        _check_lengths(lengths, int(self._arguments.tokens))
        if self._bits is not None:
            k, v = (array.view(self._bits) for array in (k, v))
        attend: Callable[..., None] = blocked.partial_attention
        if self._arguments.reproducible:
            attend = functools.partial(bins.attend, whole_blocks=self._arguments.reproducible == 2)
        given = {"lengths": lengths, "tables": self._mask, "block_table": block_table}
        attend(q, k, v, self._records, *self._scales, scale=self._scale, **given)

    def _torn(self) -> bool:
        """Whether there may be parts of blocks on other ranks."""
        return self._arguments.reproducible == 2 and self._mask is not None and self._mask.drafts > 0

    def _bind(self, q: Array, k: Array, v: Array, block_table: Array | None) -> None:
        self._bound = None
        a = self._arguments
        a.q_type, a.kv_type = _element_types(q, k, v, self._records, self._bits)
        for scales in self._scales:
            if scales is not None and scales.shape != k.shape[2:3]:
                raise ArgumentError(f"{len(scales)} scales for {k.shape[2]} KV heads: one for each is needed")
        a.block_table, a.pages, a.page_size = None, 1, k.shape[1]
        if block_table is not None:
            a.block_table, a.pages = address(block_table), block_table.shape[1]
        a.tokens = a.pages * a.page_size
        check_tokens(a.tokens, self._most_tokens)
        if self._kernels is not None:
            a.q, a.k, a.v = map(address, (q, k, v))
            a.batch, a.queries, a.heads, a.head_dim = q.shape
            a.kv_heads, a.v_dim = k.shape[2], v.shape[3]
            a.q_strides, a.k_strides, a.v_strides = q.strides[:3], k.strides[:3], v.strides[:3]
            self._reserve(self._kernels.attention_workspace(self._pointer))
        self._bound = (q, k, v, block_table)

    def _bind_lengths(self, lengths: Array | None, q: Array) -> Array | None:
        self._lengths = None
        self._arguments.lengths = None
        if lengths is None:
            return None
        lengths = np.ascontiguousarray(lengths, np.int64)
        if lengths.shape != q.shape[:1]:
            raise ArgumentError(f"lengths has shape {lengths.shape}: one for each of {q.shape[0]} batch rows")
        self._arguments.lengths = address(lengths)
        # Perhaps a converted copy, which no argument ever is: it is made anew in the next call.
        self._lengths = lengths
        return lengths

    def _reserve(self, size: int) -> None:
        if self._workspace.nbytes < size + _ALIGNMENT:
            self._workspace = np.empty(size + size // 8 + _ALIGNMENT, np.uint8)
            start = address(self._workspace)
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


def _check_lengths(lengths: Array | None, tokens: int) -> None:
    for b, length in enumerate(() if lengths is None else lengths):
        if not 0 <= length <= tokens:
            raise ArgumentError(f"lengths[{b}] = {length} is not in 0..{tokens}, the tokens of this shard")


def _element_types(
    q: Array, k: Array, v: Array, records: Array, bits: np.dtype[Any] | None
) -> tuple[int, int]:
    """The element types of q, and of k and v, as the kernel numbers them. bits: what k and v of uint8 carry.
    Raises `ArgumentError`, also for elements that do not lie side by side."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.strides[3] != array.itemsize and array.shape[3] > 1 and array.size:
            raise ArgumentError(f"the last axis of {name} must be contiguous")
    if records.dtype == np.float64:
        return 0, 0
    types = [_ELEMENT_TYPES.get(one) for one in (q.dtype, bits if bits and k.dtype == np.uint8 else k.dtype)]
    if types[0] is None or types[1] is None or types[0] in _CACHES_ONLY:
        raise ArgumentError(
            f"q {q.dtype}, k {k.dtype}: with float32 records they are float32, float16 or bfloat16, and k "
            "may be float8_e4m3fn or float8_e5m2"
        )
    return types[0], types[1]


def fastest_way() -> str:
    """Which of `WAYS` is the fastest on this processor: measured once, in a tenth of a second, and kept."""
    return _fastest_way(compile.chosen_isa())


@functools.cache
def _fastest_way(isa: str) -> str:
    return compile.measured(isa, WAYS, measure_way)


def measure_way() -> str:
    """The fastest of `WAYS`, by medians of seven runs in turn: it is kept, and may be measured beside other
    work. Each run reads bfloat16 at another of sixteen places, 256 MiB in all: no cache holds them.

    What pays differs between processors by a factor of two either way: a Zen 3 reads four places in turn at
    94 percent of the fastest reader and one stream at 74, a Zen 4 the first at half the rate of the second.
    """
    k, v = (np.full((16, 1 << 12, 8, 128), 0x3F80, np.uint16) for _ in "kv")
    records = np.empty((1, 8, 1, 130), np.float32)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    runs = {way: PlannedAttention(records, scale=1.0, threads=1, way=way) for way in WAYS}
    for turn, (way, run) in enumerate([*runs.items()] * 7):
        place = slice(turn % 16, turn % 16 + 1)
        start = time.thread_time()
        run(k[place, :1], k[place], v[place])
        seconds[way].append(time.thread_time() - start)
    return min(WAYS, key=lambda way: statistics.median(seconds[way]))


def process_threads() -> int:
    text = os.environ.get("TREEATTN_THREADS", "1")
    if not text.isdecimal() or not 1 <= int(text) <= MAX_THREADS:
        raise ArgumentError(f"TREEATTN_THREADS={text}: a number of threads, from 1 to {MAX_THREADS}")
    return int(text)
