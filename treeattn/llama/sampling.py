"""Choice of the next token: greedy, or temperature, top-k and top-p sampling.

In this order, as in Hugging Face's ``generate``: logits are divided by the temperature, all but the `top_k`
largest are left out, then the least likely tokens that the first ones do without to reach `top_p`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeattn import communicators
from treeattn.errors import ArgumentError
from treeattn.token_tree import Accepted, TokenTree, accept_greedy, accept_sample
from treeattn.token_tree.accept import draw_token

Logits = NDArray[np.float32]
Probabilities = NDArray[np.float64]


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
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            raise ArgumentError("top_k and top_p say what may be drawn: give a temperature above 0 too")

    def choose(self, logits: Logits, generator: np.random.Generator) -> int:
        """A token by logits [vocabulary]. Raises `ArgumentError` where they let none be chosen."""
        if self.temperature == 0:
            return int(_likeliest(logits))
        return draw_token(self.probabilities(logits), generator)

    def accept(self, tree: TokenTree, logits: Logits, generator: np.random.Generator) -> Accepted:
        """The nodes of a tree [1, L] that are kept by logits [L, vocabulary], and the token after them: a
        draft is kept where it is what `choose` would have chosen. Raises `ArgumentError` as `choose`."""
        alone = communicators.alone()
        if self.temperature == 0:
            return accept_greedy(tree, _likeliest(logits)[None], comm=alone)
        return accept_sample(tree, self.probabilities(logits)[None], generator, comm=alone)

    def probabilities(self, logits: Logits) -> Probabilities:
        """Probabilities [.., vocabulary] of logits of this shape; NaN where logits are, or all are -inf."""
        with np.errstate(invalid="ignore", over="ignore"):
            x = np.asarray(logits, np.float64)
            x = (x - x.max(-1, keepdims=True)) / self.temperature
            weights = np.exp(self._keep_top_k(x))
            return self._keep_top_p(weights / weights.sum(-1, keepdims=True))

    def _keep_top_k(self, x: Probabilities) -> Probabilities:
        """-inf for all but the largest; those that are equal to the last of them stay too."""
        if not 0 < self.top_k < x.shape[-1]:
            return x
        last = np.partition(x, -self.top_k, -1)[..., -self.top_k, None]
        return np.where(x < last, -np.inf, x)

    def _keep_top_p(self, p: Probabilities) -> Probabilities:
        if self.top_p == 1:
            return p
        order = np.argsort(-p, -1, kind="stable")
        falling = np.take_along_axis(p, order, -1)
        before = np.cumsum(falling, -1) - falling
        kept = np.zeros_like(p)
        np.put_along_axis(kept, order, np.where(before < self.top_p, falling, 0), -1)
        return np.asarray(kept / kept.sum(-1, keepdims=True))


def _likeliest(logits: Logits) -> NDArray[np.int64]:
    """The tokens [..] of the largest logits, the first of equals; NumPy takes NaN for the largest number."""
    tokens = np.asarray(logits.argmax(-1), np.int64)
    if (nan := np.isnan(np.take_along_axis(logits, tokens[..., None], -1)[..., 0])).any():
        raise ArgumentError(
            f"logits are NaN at token {tokens[nan][0]}: the model's weights, or its sums, overflow"
        )
    return tokens
