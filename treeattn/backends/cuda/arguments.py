"""Which arrays the attention kernels take."""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn import partial
from treeattn.backends.cuda.runtime import Runtime
from treeattn.backends.cuda.variants import TYPES, check_head_dim
from treeattn.errors import ArgumentError
from treeattn.partial import Array

#: Blocks along the second and third axis of a grid.
MAX_GRID = 65535
_MAX_TOKENS = 2**31 - 64  # positions of tokens are 32-bit integers, a step beyond the last one too


def layout_of(q: Array, k: Array, v: Array) -> tuple[Any, ...]:
    """What decides kernel and strides; of the number of tokens only whether their stride counts."""
    k_shape, v_shape = k.shape, v.shape
    return (
        *(q.shape, q.strides, q.dtype, k.strides, k.dtype, v.strides, v.dtype),
        *(len(k_shape), k_shape[:1], k_shape[2:], min(k_shape[1:2], (2,))),
        *(len(v_shape), v_shape[:1], v_shape[2:], k_shape[1:2] == v_shape[1:2]),
    )


def check_inputs(
    q: Array, k: Array, v: Array, records: Array, block_table: Array | None, runtime: Runtime
) -> str:
    """C++ type of q; an error if anything does not fit."""
    batch, v_dim = records.shape[0], records.shape[3] - partial.EXTRA
    if q.dtype.name not in TYPES:
        raise wrong_type("q", q)
    if block_table is not None:
        check_table(block_table, batch)
    check_head_dim(q.shape[3], v_dim)
    if v_dim != q.shape[3] and not is_latent(k, v, runtime):
        raise ArgumentError(
            f"on the GPU values of {v_dim} channels are the first ones of the keys: pass v=None and "
            f"v_dim={v_dim}; values of their own with another width than keys are for device='cpu'"
        )
    if batch > MAX_GRID:
        raise ArgumentError(f"batch {batch}: at most {MAX_GRID} fits one launch")
    check_tokens(k.shape[1])
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_rows(name, array, runtime)
    return TYPES[q.dtype.name][0]


def is_latent(k: Array, v: Array, runtime: Runtime) -> bool:
    """Whether v is the first channels of k, in k's own memory."""
    same = v.shape[3] < k.shape[3] and (v.dtype, v.strides) == (k.dtype, k.strides)
    return same and (v.size == 0 or runtime.address(v) == runtime.address(k))


def check_tokens(tokens: int) -> None:
    """Raise `ArgumentError` for more than a launch can number."""
    if tokens >= _MAX_TOKENS:
        raise ArgumentError(f"{tokens} tokens: fewer than {_MAX_TOKENS} fit one launch")


def check_rows(name: str, array: Array, runtime: Runtime) -> None:
    """Raise `ArgumentError` unless rows of head_dim can be loaded: those of k and v 16 bytes at a time."""
    if array.size == 0:
        return
    if array.strides[3] != array.dtype.itemsize:
        raise ArgumentError(f"the last axis of {name} must be contiguous: copy it with ascontiguousarray")
    bytes_ = array.dtype.itemsize if name == "q" else 16
    if not rows_aligned(array, bytes_, runtime):
        raise ArgumentError(
            f"rows of {name} must begin at multiples of {bytes_} bytes: strides are {array.strides} bytes; "
            "copy it with ascontiguousarray"
        )


def rows_aligned(array: Array, multiple: int, runtime: Runtime) -> bool:
    """Whether rows begin at multiples of so many bytes, a power of two."""
    places = runtime.address(array)
    for stride, size in zip(array.strides[:3], array.shape[:3], strict=True):
        if size > 1:
            places |= stride
    return not places % multiple


def check_table(table: Array, batch: int) -> None:
    """Raise `ArgumentError` unless it is a block table."""
    if table.ndim != 2 or table.shape[0] != batch or table.dtype != np.int32 or not table.flags.c_contiguous:
        raise ArgumentError(
            f"the block table is {table.dtype} {list(table.shape)}: contiguous int32 [batch, pages] = "
            f"[{batch}, any] is needed"
        )


def wrong_type(name: str, array: Array) -> ArgumentError:
    """The error for an array of a type that no kernel takes."""
    return ArgumentError(
        f"{name} is {array.dtype}: on the GPU it must be float32, float16 or bfloat16 "
        "(as uint16 bits); float64 is for device='cpu'"
    )
