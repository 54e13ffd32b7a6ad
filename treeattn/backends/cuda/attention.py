"""Partial attention on an NVIDIA GPU: which kernel, in how many splits, launched without allocating."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from treeattn import partial
from treeattn.attention.shape import check_shapes
from treeattn.backends.cuda.runtime import THREADS, Runtime, check_records, default_runtime, structure
from treeattn.errors import ArgumentError, BackendError

__all__ = [
    "HEAD_DIMS",
    "MAX_SPLITS",
    "TENSOR_CORES_FROM_ROWS",
    "PlannedAttention",
    "check_head_dim",
    "check_rows",
    "choose_splits",
    "fma_kernel",
    "mma_kernel",
    "mma_shared_bytes",
    "partial_attention",
]

#: Head dimensions that the attention kernels are built for.
HEAD_DIMS = (64, 80, 96, 128, 256)
#: MAX_SPLITS of kernels/cuda/attention.cuh.
MAX_SPLITS = 256
#: Query rows of a KV head from which tensor cores are used: fewer would make them multiply mostly padding.
TENSOR_CORES_FROM_ROWS = 4

_MAX_GRID = 65535  # blocks along the second and third axis of a grid
_TILE = 64  # tokens that a block of the tensor-core kernel takes at a time
_MMA_ROWS = 16
# C++ type and ElementType of kernels/cuda/attention.cuh. uint16 stands for the bits of bfloat16.
_TYPES = {
    "float32": ("float", 0),
    "float16": ("float16", 1),
    "bfloat16": ("bfloat16", 2),
    "uint16": ("bfloat16", 2),
}

# AttentionArguments of kernels/cuda/attention.cuh.
_ATTENTION = structure(
    "q k v lengths mask records split_records counters",
    "q_batch_stride q_query_stride q_head_stride k_batch_stride k_token_stride k_head_stride "
    "v_batch_stride v_token_stride v_head_stride mask_batch_stride",
    "tokens queries heads kv_heads mask_words mask_tokens q_type",
    "scale",
)


def fma_kernel(kv_type: str, head_dim: int, rows: int) -> str:
    """C++ name of the multiply-add kernel; `rows`: query rows that share a KV head."""
    return f"partial_attention<{kv_type}, {head_dim}, {1 if rows == 1 else 2 if rows == 2 else 4}>"


def mma_shared_bytes(head_dim: int, stages: int) -> int:
    """Dynamic shared memory of the tensor-core kernel: stages of keys and values, rows padded by 16 bytes."""
    return 2 * stages * _TILE * (head_dim + 8) * 2


def mma_kernel(kv_type: str, head_dim: int, shared_limit: int) -> tuple[str, int] | None:
    """C++ name and dynamic shared memory of the tensor-core kernel; None where it needs too much.

    Three stages if two blocks of them fit beside each other, else two.
    """
    stages = 3 if 2 * mma_shared_bytes(head_dim, 3) <= shared_limit else 2
    size = mma_shared_bytes(head_dim, stages)
    return (f"partial_attention_mma<{kv_type}, {head_dim}, {stages}>", size) if size <= shared_limit else None


def choose_splits(blocks: int, tokens: int, slots: int) -> int:
    """Into how many splits a shard is best cut.

    Minimises waves * (tiles per split + 10) + 0.22 * splits, in units of the time that a block takes for
    a tile of 64 tokens: a wave has a fixed cost of about ten tiles, each split adds to the final merge.

    Args:
        blocks: of one split (batch * KV heads * tiles of rows).
        tokens: of the shard.
        slots: blocks that the device holds at once.
    """
    return _choose_splits(blocks, max(1, math.ceil(tokens / _TILE)), slots)


@functools.lru_cache(maxsize=256)
def _choose_splits(blocks: int, tiles: int, slots: int) -> int:
    """Kept by tiles, so that a cache that grows token by token asks once in 64 steps."""

    def cost(splits: int) -> float:
        return math.ceil(blocks * splits / slots) * (math.ceil(tiles / splits) + 10) + 0.22 * splits

    return min(range(1, min(MAX_SPLITS, tiles) + 1), key=cost)


def partial_attention(
    q: Any,
    k: Any,
    v: Any,
    records: Any,
    *,
    scale: float,
    lengths: Any = None,
    mask: Any = None,
    mask_tokens: int = 0,
    num_splits: int | None = None,
    tensor_cores: bool = True,
    runtime: Runtime | None = None,
) -> None:
    """Write the records of every query head attending to this device's tokens.

    Args:
        q: [batch, queries, heads, head_dim].
        k, v: [batch, tokens, kv_heads, head_dim], any strides that keep rows aligned to 16 bytes, the
            last axis contiguous; tokens may be 0.
        records: written, C-contiguous [batch, heads, queries, head_dim + 2], float32.
        scale: factor of the logits, usually 1 / sqrt(head_dim).
        lengths: [batch] int64 on the device, the valid tokens, read at launch and clamped to
            0..tokens (the host cannot look without waiting); None means all.
        mask: [batch, queries, words] uint64 on the device: bit j % 64 of word j // 64 says whether a query
            sees the j-th of the last `mask_tokens` valid tokens; earlier ones are seen. None: all are.
        mask_tokens: how many tokens the mask speaks of.
        num_splits: in how many splits to cut the tokens, 1..MAX_SPLITS; None chooses by `choose_splits`.
        tensor_cores: may probabilities be held in 16 bits, for speed? Then |out - exact| can reach
            4e-3 * max|v|. Only used with 16-bit inputs of one type and 4 or more rows for each KV head.
        runtime: the device; None is CuPy's current one.

    Inputs are float32, float16, bfloat16 or uint16 (the bits of bfloat16).

    Raises:
        ArgumentError: shapes, types, strides or devices that cannot be.
        BackendError: no GPU or no CuPy, a head_dim without a kernel.
    """
    planned = PlannedAttention(
        records, scale=scale, num_splits=num_splits, tensor_cores=tensor_cores, runtime=runtime
    )
    planned(q, k, v, lengths, mask=mask, mask_tokens=mask_tokens)


class PlannedAttention:
    """`partial_attention` into records that stay where they are.

    Calling it with the arrays of the last call (the same objects) is one launch: nothing is derived,
    allocated or waited for. It keeps references to them and to its workspace until the next call.
    """

    def __init__(
        self,
        records: Any,
        *,
        scale: float,
        num_splits: int | None = None,
        tensor_cores: bool = True,
        runtime: Runtime | None = None,
    ) -> None:
        """Plan for `records` and the options as in `partial_attention`."""
        self._runtime = runtime = runtime or default_runtime()
        check_records(records, runtime)
        if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
            raise ArgumentError(f"num_splits = {num_splits}: it must be 1..{MAX_SPLITS}")
        self._records = records
        self._num_splits = num_splits
        self._tensor_cores = tensor_cores and runtime.tensor_cores
        self._arguments = np.zeros(1, _ATTENTION)
        self._arguments["scale"] = scale
        self._arguments["records"] = runtime.address(records)
        self._split_records = runtime.zeros(0, np.float32)
        self._counters = runtime.zeros(0, np.uint32)
        self._workspaces: list[Any] = []
        self._bound: tuple[Any, ...] = ()
        self._mask_tokens = 0
        self._launch: Callable[[], object]

    def __call__(
        self, q: Any, k: Any, v: Any, lengths: Any = None, *, mask: Any = None, mask_tokens: int = 0
    ) -> None:
        """As `partial_attention`."""
        bound, given = self._bound, (q, k, v, lengths, mask)
        if not bound or any(map(operator.is_not, bound, given)) or mask_tokens != self._mask_tokens:
            self._bind(*given, mask_tokens)
        self._launch()

    def _bind(self, q: Any, k: Any, v: Any, lengths: Any, mask: Any, mask_tokens: int) -> None:
        self._bound = ()
        runtime, a = self._runtime, self._arguments
        q_type, kv_type = _check_inputs(q, k, v, self._records, runtime)
        for name, array in (("q", q), ("k", k), ("v", v)):
            a[name] = runtime.address(array)
            axes = ("batch", "query" if name == "q" else "token", "head")
            for axis, stride in zip(axes, array.strides[:3], strict=True):
                a[f"{name}_{axis}_stride"] = stride // array.dtype.itemsize
        a["queries"], a["heads"] = q.shape[1:3]
        a["tokens"], a["kv_heads"] = k.shape[1:3]
        a["q_type"] = _TYPES[q.dtype.name][1]
        self._bind_lengths(lengths, k)
        self._bind_mask(mask, mask_tokens, q)
        self._choose_kernel(q, k, q_type, kv_type)
        self._bound, self._mask_tokens = (q, k, v, lengths, mask), mask_tokens

    def _bind_lengths(self, lengths: Any, k: Any) -> None:
        self._arguments["lengths"] = 0
        if lengths is None:
            return
        self._runtime.check("lengths", lengths)
        if lengths.shape != k.shape[:1] or lengths.dtype != np.int64 or not lengths.flags.c_contiguous:
            raise ArgumentError(
                f"lengths are {lengths.dtype} {lengths.shape}: contiguous int64 [{k.shape[0]}] is needed"
            )
        self._arguments["lengths"] = self._runtime.address(lengths)

    def _bind_mask(self, mask: Any, mask_tokens: int, q: Any) -> None:
        a = self._arguments
        a["mask"] = a["mask_words"] = a["mask_tokens"] = a["mask_batch_stride"] = 0
        if mask is None:
            return
        self._runtime.check("mask", mask)
        if mask.ndim != 3 or mask.shape[:2] != q.shape[:2] or mask.dtype != np.uint64:
            raise ArgumentError(
                f"the mask is {mask.dtype} {mask.shape}: uint64 [batch, queries, words] = "
                f"[{q.shape[0]}, {q.shape[1]}, any] is needed"
            )
        if not mask.flags.c_contiguous or not 0 <= mask_tokens <= 64 * mask.shape[2]:
            raise ArgumentError(
                f"mask_tokens = {mask_tokens}: a C-contiguous mask of {mask.shape[2]} words holds 64 each"
            )
        a["mask"] = self._runtime.address(mask)
        a["mask_words"], a["mask_tokens"] = mask.shape[2], mask_tokens
        a["mask_batch_stride"] = mask.shape[1] * mask.shape[2]

    def _choose_kernel(self, q: Any, k: Any, q_type: str, kv_type: str) -> None:
        batch, queries, heads, head_dim = q.shape
        kv_heads, rows = k.shape[2], queries * (heads // k.shape[2])
        wanted = None
        if self._tensor_cores and rows >= TENSOR_CORES_FROM_ROWS and q_type == kv_type != "float":
            wanted = mma_kernel(kv_type, head_dim, self._runtime.shared_bytes)
        module = "partial_attention_mma" if wanted else "partial_attention"
        expression, shared = wanted or (fma_kernel(kv_type, head_dim, rows), 0)
        kernel = self._runtime.kernel(module, expression, shared)
        tile = _MMA_ROWS if wanted else min(4, 1 << (rows - 1).bit_length())
        tiles = kv_heads * math.ceil(rows / tile)
        if tiles > _MAX_GRID:
            raise ArgumentError(f"{queries} queries of {heads} heads are too many for one launch: split them")
        splits = self._num_splits
        if splits is None:
            resident = self._runtime.resident_blocks(kernel, THREADS, shared)
            splits = choose_splits(batch * tiles, k.shape[1], resident * self._runtime.multiprocessors)
        self._reserve(splits, batch * tiles)
        grid, block = (splits, tiles, batch), (THREADS,)
        self._launch = functools.partial(kernel, grid, block, (self._arguments,), shared_mem=shared)

    def _reserve(self, splits: int, counters: int) -> None:
        """Workspace for the splits; it only ever grows, and with room, so that steps do not allocate.

        What was outgrown stays: a graph that was captured before still writes there.
        """
        size = self._records.size * splits if splits > 1 else 0
        if self._split_records.size < size:
            self._split_records = self._runtime.zeros(size + size // 2, np.float32)
            self._workspaces.append(self._split_records)
        if self._counters.size < counters:
            self._counters = self._runtime.zeros(2 * counters, np.uint32)
            self._workspaces.append(self._counters)
        self._arguments["split_records"] = self._runtime.address(self._split_records)
        self._arguments["counters"] = self._runtime.address(self._counters)


def check_head_dim(head_dim: int) -> None:
    """Raise `BackendError` where there is no kernel for it."""
    if head_dim not in HEAD_DIMS:
        raise BackendError(
            f"no CUDA kernel for head_dim {head_dim}: there are {', '.join(map(str, HEAD_DIMS))}; "
            "pad it with zeros, or use device='cpu'"
        )


def _check_inputs(q: Any, k: Any, v: Any, records: Any, runtime: Runtime) -> tuple[str, str]:
    """C++ types of q and of k, v; an error if anything does not fit."""
    batch, head_dim = records.shape[0], records.shape[3] - partial.EXTRA
    for name, array in (("q", q), ("k", k), ("v", v)):
        runtime.check(name, array)
        if array.dtype.name not in _TYPES:
            raise ArgumentError(
                f"{name} is {array.dtype}: on the GPU it must be float32, float16 or bfloat16 "
                "(as uint16 bits); float64 is for device='cpu'"
            )
    check_head_dim(head_dim)
    check_shapes(q, k, v, records)
    if k.shape[1] >= 2**31 - _TILE or batch > _MAX_GRID:
        raise ArgumentError(f"batch {batch}, tokens {k.shape[1]}: at most 65535 and 2^31 fit one launch")
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_rows(name, array, runtime)
    return _TYPES[q.dtype.name][0], _TYPES[k.dtype.name][0]


def check_rows(name: str, array: Any, runtime: Runtime) -> None:
    """Raise `ArgumentError` unless rows of head_dim elements can be loaded 16 bytes at a time."""
    if array.size == 0:
        return
    if array.strides[3] != array.dtype.itemsize:
        raise ArgumentError(f"the last axis of {name} must be contiguous: copy it with ascontiguousarray")
    strides = [stride for stride, size in zip(array.strides[:3], array.shape[:3], strict=True) if size > 1]
    if name != "q" and any(at % 16 for at in (runtime.address(array), *strides)):
        raise ArgumentError(
            f"rows of {name} must begin at multiples of 16 bytes: strides are {array.strides} bytes; "
            "copy it with ascontiguousarray"
        )
