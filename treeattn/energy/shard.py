"""What one shard adds to the energy: records of its tilted scores, in float64, block by block.

The tilted score of a key is ``scale q.k + zeta.v``. A record is their maximum, the sum of
exp(score - maximum), and the same sum of some features of the values: a merge of records is one of all three,
whatever the features are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from treeattn import partial
from treeattn.partial import Array

_BYTES = 1 << 25  # about what the arrays of a block may take


class Features(NamedTuple):
    """What the numerators sum: `of` a batch row and its float64 values [kv_heads, tokens, head_dim] gives
    numbers [kv_heads, tokens, width]."""

    width: int
    of: Callable[[int, Array], Array]


class EnergyInputs(NamedTuple):
    """The energy's arguments on this rank: q and zeta (None is 0) [batch, queries, heads, head_dim], k and v
    [batch, tokens, kv_heads, head_dim], and the tokens that each query sees, [batch, queries, (begin, end,
    begin, end)]."""

    q: Array
    zeta: Array | None
    k: Array
    v: Array
    scale: float
    intervals: Array


def records(inputs: EnergyInputs, features: Features, dtype: DTypeLike) -> Array:
    """Records [batch, heads, queries, 2 + width] of the tokens that each query sees; float32 or float64."""
    batch, queries, heads = inputs.q.shape[:3]
    made = partial.identity((batch, heads, queries), features.width, np.float64)
    for row in range(batch):
        for interval in np.unique(inputs.intervals[row], axis=0):
            alike = (inputs.intervals[row] == interval).all(axis=-1)
            folded = made[row][:, alike]
            for tokens in _blocks(inputs, interval, int(alike.sum()), features.width):
                partial.merge(folded, _block(inputs, row, alike, tokens, features))
            made[row][:, alike] = folded
    return made if dtype == np.float64 else _narrowed(made)


def _blocks(inputs: EnergyInputs, interval: Array, queries: int, width: int) -> Iterator[slice]:
    """The tokens of an interval, few enough at once for their scores and features."""
    kv_heads, head_dim = inputs.k.shape[2:]
    each = 8 * (2 * inputs.q.shape[2] * queries + kv_heads * (2 * head_dim + 2 * width))
    step = max(16, _BYTES // each)
    for begin, end in interval.reshape(2, 2).tolist():
        for start in range(begin, end, step):
            yield slice(start, min(start + step, end))


def _block(inputs: EnergyInputs, row: int, queries: Array, tokens: slice, features: Features) -> Array:
    """Records [heads, queries, 2 + width] over a few tokens, at least one, of one batch row."""
    keys, values = (_wide(array[row, tokens]).transpose(1, 0, 2) for array in (inputs.k, inputs.v))
    with np.errstate(all="ignore"):
        scores = (_by_kv_head(inputs.q[row, queries], keys) * inputs.scale) @ keys.transpose(0, 2, 1)
        if inputs.zeta is not None:
            scores += _by_kv_head(inputs.zeta[row, queries], values) @ values.transpose(0, 2, 1)
        maximum = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - np.where(maximum == -np.inf, 0, maximum))
        denominator = weights.sum(axis=-1, keepdims=True)
        numerator = weights @ features.of(row, values)
    maximum = np.where(np.isnan(denominator), np.nan, maximum)
    joined = np.concatenate((maximum, denominator, numerator), axis=-1)
    return joined.reshape(inputs.q.shape[2], -1, features.width + partial.EXTRA)


def _by_kv_head(rows: Array, keys: Array) -> Array:
    """[queries, heads, head_dim] as [kv_heads, heads of the group * queries, head_dim]: as records lie."""
    return _wide(rows).transpose(1, 0, 2).reshape(keys.shape[0], -1, rows.shape[-1])


def _wide(values: Array) -> Array:
    return np.ascontiguousarray(values, np.float64)


def _narrowed(wide: Array) -> Array:
    """Records of float32: the rounding of a maximum is made good in what was summed relative to it."""
    maximum = wide[..., :1]
    with np.errstate(all="ignore"):
        rounded = maximum.astype(np.float32)
        sums = wide[..., 1:] * np.exp(np.where(np.isfinite(rounded), maximum - rounded, 0))
        return np.concatenate((rounded, sums), axis=-1, dtype=np.float32, casting="same_kind")
