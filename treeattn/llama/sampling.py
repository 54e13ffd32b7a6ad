"""How the next token is chosen: the likeliest, or one that is drawn as often as the model has it.

In this order, as in Hugging Face's ``generate``: logits are divided by the temperature, all but the `top_k`
largest are left out, then the least likely tokens that the first ones do without to reach `top_p`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from treeattn.errors import ArgumentError

__all__ = ["Sampling"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature: 0 for the likeliest token, which takes no other setting. top_k: how many of the likeliest
    tokens may be drawn, 0 for all. top_p: the fewest tokens may be drawn that are so likely together. seed:
    of NumPy's default generator, which draws one number for each token.

    Raises `ArgumentError` for values that are none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ArgumentError(f"temperature {self.temperature}: give a number from 0 on, 0 for no sampling")
        if self.top_k < 0:
            raise ArgumentError(f"top_k {self.top_k}: give a number of tokens, 0 for all")
        if not 0 < self.top_p <= 1:
            raise ArgumentError(f"top_p {self.top_p}: give a probability above 0, 1 for all tokens")
        if self.seed < 0:
            raise ArgumentError(f"seed {self.seed}: give a whole number from 0 on")
        if self.greedy and (self.top_k or self.top_p < 1):
            raise ArgumentError("top_k and top_p say what may be drawn: give a temperature above 0 too")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    def probabilities(self, logits: Any) -> Any:
        """float64 [.., vocabulary] of logits [.., vocabulary]; NaN where logits are, or all are -inf."""
        with np.errstate(invalid="ignore", over="ignore"):
            x = np.asarray(logits, np.float64)
            x = (x - x.max(-1, keepdims=True)) / self.temperature
            weights = np.exp(self._likeliest(x))
            return self._nucleus(weights / weights.sum(-1, keepdims=True))

    def _likeliest(self, x: Any) -> Any:
        """-inf for all but the largest; those that are equal to the last of them stay too."""
        if not 0 < self.top_k < x.shape[-1]:
            return x
        last = np.partition(x, -self.top_k, -1)[..., -self.top_k, None]
        return np.where(x < last, -np.inf, x)

    def _nucleus(self, p: Any) -> Any:
        if self.top_p == 1:
            return p
        order = np.argsort(-p, -1, kind="stable")
        falling = np.take_along_axis(p, order, -1)
        before = np.cumsum(falling, -1) - falling
        kept = np.zeros_like(p)
        np.put_along_axis(kept, order, np.where(before < self.top_p, falling, 0), -1)
        return kept / kept.sum(-1, keepdims=True)
