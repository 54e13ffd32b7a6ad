"""The oracle: attention in float64, written to be obviously right, with no concern for speed.

softmax(scale * q k^T) v, one query at a time, after Vaswani et al. 2017, equation 1. `attention` sees the
whole cache. `partial` and `combine` give the same answer from shards, so that a check of a sharded run
never needs the whole cache in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from treeattn.partial import Array


class Partial(NamedTuple):
    """One shard's float64 partials and what the error bound needs.

    max, denominator [batch, heads, queries]; numerator [batch, heads, queries, head_dim];
    score_scale: the largest scale * sum_i |q_i k_i| over all rows and keys; largest_value: max |v|.
    """

    max: Array
    denominator: Array
    numerator: Array
    score_scale: float
    largest_value: float


def attention(
    q: Array, k: Array, v: Array, *, scale: float, sinks: Array | None = None, **rules: Any
) -> tuple[Array, Array]:
    """Attention of q [batch, queries, heads, head_dim] over k, v [batch, tokens, kv_heads, head_dim].

    rules: lengths, seen, softcap, alibi and distance as for `partial`. sinks: [heads] logits of a key without
    a value, seen by every query. Returns out [batch, queries, heads, head_dim] and the natural-log lse
    [batch, heads, queries], float64. Rows without any key give out 0 and lse -inf.
    """
    parts = [partial(q, k, v, scale=scale, **rules)]
    if sinks is not None:
        parts.append(sink(parts[0], sinks))
    return combine(parts)


def seen(
    positions: Array,
    q_positions: Array,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    leading: int = 0,
    begins: ArrayLike = 0,
) -> Array:
    """Who sees whom, token by token: bool [batch, queries, tokens].

    positions [tokens], q_positions [batch, queries], begins [batch]. A key at s is seen from t when
    begin <= s and (not causal or s <= t) and (no window, or t - left <= s <= t + right, or
    s - begin < leading).
    """
    first = np.reshape(begins, (-1, 1, 1))
    t, s = np.asarray(q_positions)[:, :, None], np.asarray(positions)[None, None, :]
    left, right = window or (None, None)
    inside = np.ones(np.broadcast_shapes(t.shape, s.shape), bool)
    if left is not None:
        inside &= t - left <= s
    if right is not None:
        inside &= s <= t + right
    visible: Array = (inside | (s - first < leading)) & (first <= s) & ((s <= t) if causal else True)
    return visible


def partial(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    lengths: Array | None = None,
    seen: Array | None = None,
    softcap: float | None = None,
    alibi: Array | None = None,
    distance: Array | None = None,
) -> Partial:
    """The float64 partials of one shard.

    lengths: [batch] valid tokens. seen: bool [batch, queries, tokens], None is all. softcap: a logit x
    becomes softcap * tanh(x / softcap). alibi: [heads], then less alibi * distance, which is t - s
    [batch, queries, tokens].
    """
    batch, queries, heads, _ = q.shape
    group = heads // k.shape[2]
    result = Partial(
        np.full((batch, heads, queries), -np.inf),
        np.zeros((batch, heads, queries)),
        np.zeros((batch, heads, queries, v.shape[3])),
        0.0,
        0.0,
    )
    score_scale = largest_value = 0.0
    for b in range(batch):
        valid = k.shape[1] if lengths is None else int(lengths[b])
        for h in range(heads if valid else 0):
            all_keys = np.asarray(k[b, :valid, h // group], np.float64)
            all_values = np.asarray(v[b, :valid, h // group], np.float64)
            for i in range(queries):
                chosen = slice(valid) if seen is None else np.flatnonzero(seen[b, i, :valid])
                keys, values = all_keys[chosen], all_values[chosen]
                if not len(keys):
                    continue
                largest_value = max(largest_value, _largest_finite(values))
                query = np.asarray(q[b, i, h], np.float64)
                with np.errstate(invalid="ignore"):
                    scores = scale * (keys @ query)
                score_scale = max(score_scale, abs(scale) * _largest_finite(np.abs(keys) @ np.abs(query)))
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                bias = 0.0 if alibi is None or distance is None else float(alibi[h]) * distance[b, i, chosen]
                scores = scores - bias
                top = scores.max()
                with np.errstate(invalid="ignore"):  # NaN and infinite inputs give NaN, as they should
                    weights = np.zeros_like(scores) if top == -np.inf else np.exp(scores - top)
                    result.max[b, h, i] = top
                    result.denominator[b, h, i] = weights.sum()
                    result.numerator[b, h, i] = weights @ values
                # What is added to a logit is rounded with it; where the weight is nothing, so is the error.
                counted = np.abs(bias) * (weights > 1e-8)
                score_scale = max(score_scale, _largest_finite(counted))
    return result._replace(score_scale=score_scale, largest_value=largest_value)


def sink(like: Partial, logits: ArrayLike) -> Partial:
    """The partials of one more key in each head [heads], with this logit and the value 0."""
    top = np.broadcast_to(np.asarray(logits, np.float64)[:, None], like.max.shape)
    there = (top > -np.inf).astype(np.float64)
    return Partial(top, there, np.zeros_like(like.numerator), 0.0, 0.0)


def _largest_finite(values: Array) -> float:
    """Largest magnitude of what is finite: an infinite score or value must not make every error pass."""
    magnitudes = np.abs(values)
    return float(magnitudes.max(initial=0.0, where=np.isfinite(magnitudes)))


def combine(partials: Sequence[Partial]) -> tuple[Array, Array]:
    """(out, lse), as `attention` returns them, from the partials of all shards."""
    top = np.max([p.max for p in partials], axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = [np.where(p.max == -np.inf, 0.0, np.exp(p.max - top)) for p in partials]
        denominator: Array = np.sum([w * p.denominator for w, p in zip(weights, partials, strict=True)], 0)
        numerator = np.sum([w[..., None] * p.numerator for w, p in zip(weights, partials, strict=True)], 0)
        empty = denominator == 0
        out = np.where(empty[..., None], 0.0, numerator / denominator[..., None])
        lse = np.where(empty, -np.inf, top + np.log(denominator))
    return np.ascontiguousarray(out.transpose(0, 2, 1, 3)), lse


def difference(one: Array, other: Array) -> Array:
    """|one - other| in float64: 0 where both are the same, infinities and NaN too; infinite where only one is
    a number."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0.0, np.abs(one - other))
    return np.where(np.isnan(off), np.inf, off)


def error_bounds(partials: Sequence[Partial], rounded: bool = False) -> tuple[float, float]:
    """What "exact" means in float32: the largest allowed differences of out and lse from the reference.

    ``(2e-6 + 1e-6 S) * max|v|`` and ``1e-5 + 1e-6 S``, with ``S = scale * max over keys of sum |q_i k_i|``.
    rounded: softmax weights may be rounded to 16 bits (`Device.rounds_weights`), and the bound of out is
    ``4e-3 * max|v|`` where that is larger.
    """
    score = max(p.score_scale for p in partials)
    value = max(p.largest_value for p in partials)
    bound = (2e-6 + 1e-6 * score) * value
    return max(bound, 4e-3 * value) if rounded else bound, 1e-5 + 1e-6 * score
