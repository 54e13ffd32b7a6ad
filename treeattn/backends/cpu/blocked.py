"""Partial attention in NumPy, block by block: for float64, and where there is no C compiler.

Same contract as the compiled kernels, several times slower: 16-bit inputs are widened block by
block, so that memory stays small whatever the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

from treeattn import partial
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.pages import rows_of
from treeattn.partial import Array

_BLOCK = 1024  # tokens; libraries sum longer products to beyond the promised error


def partial_attention(
    q: Array,
    k: Array,
    v: Array,
    records: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    *,
    scale: float,
    lengths: Array | None = None,
    tables: MaskTables | None = None,
    block_table: Array | None = None,
) -> None:
    """Write the records of `q` attending to the first `lengths[b]` tokens of each batch row, or to those that
    `tables` says.

    Arguments as of `treeattn.backends.cpu.PlannedAttention` and its calls; records are float32 or float64.
    """
    if k_scale is not None:  # of q instead: fewer products
        q = wide(q, records.dtype) * np.repeat(k_scale, q.shape[2] // k.shape[2])[:, None]
    partial.set_identity(records)
    for b in range(q.shape[0]):
        cache = Sequence(k, v, b, block_table)
        if tables is not None:
            _masked_row(q[b], cache, records[b], scale, tables, b)
            continue
        tokens = k.shape[1] if lengths is None else int(lengths[b])
        blocks = (slice(begin, min(begin + _BLOCK, tokens)) for begin in range(0, tokens, _BLOCK))
        _merge_all(records[b], (_block(q[b], *cache.rows(block), scale, records.dtype) for block in blocks))

    if v_scale is not None:
        records[..., partial.EXTRA :] *= np.repeat(v_scale, q.shape[2] // k.shape[2])[:, None, None]


def _merge_all(into: Array, blocks: Iterable[Array]) -> None:
    """Merge blocks in pairs, pairs in pairs and so on, in their order: short sums are accurate."""
    held: list[Array] = []  # of 2^i blocks each, for the bits of how many there were
    for number, block in enumerate(blocks):
        while number % 2:
            block, number = _merged(held.pop(), block), number // 2
        held.append(block)
    while len(held) > 1:
        last = held.pop()
        held.append(_merged(held.pop(), last))
    if held:
        partial.merge(into, held[0])


def _merged(earlier: Array, later: Array) -> Array:
    partial.merge(earlier, later)
    return earlier


class Sequence(NamedTuple):
    """Keys and values of one batch row, wherever they lie."""

    k: Array
    v: Array
    b: int
    block_table: Array | None

    def rows(self, tokens: slice | Array) -> tuple[Array, Array]:
        """[tokens, kv_heads, head_dim and v_dim] of a slice of tokens, or of an array of their numbers."""
        if self.block_table is None:
            return self.k[self.b, tokens], self.v[self.b, tokens]
        if isinstance(tokens, slice):
            tokens = np.arange(tokens.start, tokens.stop)
        table = self.block_table[self.b]
        return rows_of(self.k, table, tokens), rows_of(self.v, table, tokens)


def _masked_row(q: Array, cache: Sequence, records: Array, scale: float, tables: MaskTables, b: int) -> None:
    """One batch row, query by query: what a query does not see is not looked at."""
    rules = tables.rules
    for i in range(len(q)):
        tokens, stands = tables.seen(b, i)
        distance = 0 * tokens if stands is None else tables.q_positions[b, i] - stands
        parts = [slice(begin, begin + _BLOCK) for begin in range(0, len(tokens), _BLOCK)]
        logits = (_Logits(rules.softcap or 0, rules.alibi, distance[part]) for part in parts)
        own, rows = np.ascontiguousarray(records[:, i : i + 1]), (cache.rows(tokens[part]) for part in parts)
        some = zip(rows, logits, strict=True)
        _merge_all(own, (_block(q[i : i + 1], *kv, scale, records.dtype, how) for kv, how in some))
        records[:, i : i + 1] = own


class _Logits(NamedTuple):
    """What becomes of scaled products. distance: [tokens], from each to the query."""

    softcap: float
    slopes: ArrayLike | None
    distance: Array

    def of(self, scores: Array) -> Array:
        """scores: [kv_heads, heads of a group, tokens]."""
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        if self.slopes is not None:
            slopes = np.asarray(self.slopes, scores.dtype).reshape(scores.shape[0], -1, 1)
            scores = scores - slopes * np.asarray(self.distance, scores.dtype)
        return np.asarray(scores)


def _block(q: Array, k: Array, v: Array, scale: float, dtype: Any, logits: _Logits | None = None) -> Array:
    """Records [heads, queries, head_dim + 2] over a few tokens: one batch row, at least one token."""
    queries, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    # [kv_heads, rows, head_dim] with rows = (heads of the group, queries): the order of records
    rows = wide(q, dtype).transpose(1, 0, 2).reshape(kv_heads, -1, head_dim) * dtype.type(scale)
    with np.errstate(all="ignore"):
        scores = rows @ wide(k, dtype).transpose(1, 2, 0)
        if logits is not None:
            scores = logits.of(scores)
        maximum = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - np.where(maximum == -np.inf, 0, maximum))
        denominator = weights.sum(axis=-1, keepdims=True)
        numerator = weights @ wide(v, dtype).transpose(1, 0, 2)
    maximum = np.where(np.isnan(denominator), np.nan, maximum)
    numerator = np.where(np.isnan(denominator), np.nan, numerator)
    joined = np.concatenate((maximum, denominator, numerator), axis=-1, dtype=dtype)
    return joined.reshape(heads, queries, joined.shape[-1])


def wide(values: Array, dtype: Any) -> Array:
    """As float32 or float64, C-contiguous; uint16 are the bits of bfloat16, whose cast is slow."""
    if values.dtype in (np.uint16, ml_dtypes.bfloat16):
        values = (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(values, dtype)  # of other strides some BLAS libraries make other bits
