"""Problems of energies, and their results by definition over all keys."""

from typing import Any

import numpy as np

SCALE = 0.3


def random_energy(
    tokens: int = 23,
    *,
    batch: int = 2,
    queries: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    dtype: Any = np.float64,
    seed: int = 0,
) -> tuple[Any, Any, Any, Any]:
    """zeta, q, k and v, the same on every rank."""
    draw = np.random.default_rng(seed)
    query, key = (batch, queries, heads, dim), (batch, tokens, kv_heads, dim)
    zeta, q, k, v = (draw.standard_normal(shape).astype(dtype) for shape in (query, query, key, key))
    return zeta, q, k, v


def dense(
    zeta: Any, q: Any, k: Any, v: Any, seen: Any = None, wide: Any = np.float64
) -> tuple[Any, Any, Any]:
    """(F, mean, covariance) by their definitions. seen: [queries, tokens]. wide: what it computes in."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.astype(wide), *(np.repeat(a.astype(wide), group, axis=2) for a in (k, v))
    scores = SCALE * np.einsum("bqhd,bkhd->bhqk", q, k)
    if zeta is not None:
        scores += np.einsum("bqhd,bkhd->bhqk", zeta.astype(wide), v)
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    weights /= total
    mean = np.einsum("bhqk,bkhd->bqhd", weights, v)
    apart = v[:, None] - mean[:, :, None]  # [batch, queries, tokens, heads, dim]
    return (top + np.log(total))[..., 0], mean, np.einsum("bhqk,bqkhi,bqkhj->bqhij", weights, apart, apart)


def diagonal(covariance: Any) -> Any:
    """The variances of a covariance."""
    return np.einsum("bqhii->bqhi", covariance)
