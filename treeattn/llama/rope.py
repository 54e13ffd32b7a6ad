"""Rotary positions as Llama has them: the first half of a head is rotated against the second.

Frequencies and angles are float32, as Hugging Face computes them; keys are cached rotated, so that decode may
read them in any order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from treeattn.llama.config import Rope

__all__ = ["inverse_frequencies", "rotate", "rotation"]


def inverse_frequencies(rope: Rope, head_dim: int) -> Any:
    """float32 [head_dim / 2]: theta^(-2 i / head_dim), scaled as `rope` says."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1 / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.kind == "linear":
        return frequencies / np.float32(rope.factor)
    return _llama3(frequencies, rope) if rope.kind == "llama3" else frequencies


def _llama3(frequencies: Any, rope: Rope) -> Any:
    """Long waves are stretched by `factor`, short ones left, those between blended (Llama 3.1)."""
    old, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    lengths = 2 * math.pi / frequencies
    blend = np.clip((old / lengths - low) / (high - low), 0, 1)
    return ((1 - blend) * frequencies / rope.factor + blend * frequencies).astype(np.float32)


def rotation(positions: Any, frequencies: Any) -> tuple[Any, Any]:
    """Cosines and sines [tokens, 1, head_dim / 2] of `positions` [tokens]: the same for all layers."""
    angles = positions.astype(np.float32)[:, None, None] * frequencies
    return np.cos(angles), np.sin(angles)


def rotate(x: Any, by: tuple[Any, Any]) -> Any:
    """x [tokens, heads, head_dim] rotated: a new array of x's type. The halves of a head make the pairs."""
    half, rotated = x.shape[-1] // 2, x.copy()
    (cosine, sine), first, second = by, x[..., :half], x[..., half:]
    rotated[..., :half] = first * cosine - second * sine
    rotated[..., half:] = second * cosine + first * sine
    return rotated
