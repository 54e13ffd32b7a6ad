"""Partial attention in NumPy, block by block: for float64, and where there is no C compiler.

Same contract as the compiled kernels, several times slower: 16-bit inputs are widened block by
block, so that memory stays small whatever the number of tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn import partial

__all__ = ["partial_attention"]

_BLOCK = 4096

Array = np.ndarray[Any, np.dtype[Any]]


def partial_attention(
    q: Array, k: Array, v: Array, records: Array, *, scale: float, lengths: Array | None = None
) -> None:
    """Write the records of `q` attending to the first `lengths[b]` tokens of each batch row.

    Args:
        q: [batch, queries, heads, head_dim]; float32, float64, float16, bfloat16, uint16 (bfloat16 bits).
        k, v: [batch, tokens, kv_heads, head_dim], same types; heads is a multiple of kv_heads.
        records: written, [batch, heads, queries, head_dim + 2], float32 or float64.
        scale: factor of the logits.
        lengths: [batch] integers, or None for all tokens.
    """
    partial.set_identity(records)
    for b in range(q.shape[0]):
        tokens = k.shape[1] if lengths is None else int(lengths[b])
        for begin in range(0, tokens, _BLOCK):
            end = min(begin + _BLOCK, tokens)
            partial.merge(records[b], _block(q[b], k[b, begin:end], v[b, begin:end], scale, records.dtype))


def _block(q: Array, k: Array, v: Array, scale: float, dtype: Any) -> Array:
    """Records [heads, queries, head_dim + 2] over a few tokens: one batch row, at least one token."""
    queries, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    # [kv_heads, rows, head_dim] with rows = (heads of the group, queries): the order of records
    rows = _wide(q, dtype).transpose(1, 0, 2).reshape(kv_heads, -1, head_dim) * dtype.type(scale)
    with np.errstate(all="ignore"):
        scores = rows @ _wide(k, dtype).transpose(1, 2, 0)
        maximum = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - np.where(maximum == -np.inf, 0, maximum))
        denominator = weights.sum(axis=-1, keepdims=True)
        numerator = weights @ _wide(v, dtype).transpose(1, 0, 2)
    maximum = np.where(np.isnan(denominator), np.nan, maximum)
    numerator = np.where(np.isnan(denominator), np.nan, numerator)
    joined = np.concatenate((maximum, denominator, numerator), axis=-1, dtype=dtype)
    return joined.reshape(heads, queries, head_dim + partial.EXTRA)


def _wide(values: Array, dtype: Any) -> Array:
    if values.dtype == np.uint16:  # the bits of bfloat16
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(values, dtype)  # of other strides some BLAS libraries make other bits
