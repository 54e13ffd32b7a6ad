"""Sources of draft tokens: what followed the same words before (prompt lookup), or a small model.

A drafter is given a text's tokens and proposes paths of tokens that may follow. It is right or wrong without
effect on the text, only on its speed (`treeattn.token_tree`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from treeattn import communicators
from treeattn.errors import ArgumentError
from treeattn.llama.model import Llama
from treeattn.llama.session import Session
from treeattn.partial import Array
from treeattn.token_tree import TokenTree


class Drafter(Protocol):
    """A source of drafts for one text."""

    def __call__(self, tokens: list[int], budget: int, depth: int) -> list[list[int]]:
        """Propose paths of at most `depth` tokens, together at most `budget`, that may follow `tokens`, which
        are those of the call before and more; no paths where it has no idea."""


class NgramDrafts:
    """What followed the last tokens where they stood before: the two latest places whose next tokens differ,
    found by as many tokens (at most `longest`) as there are such places for."""

    def __init__(self, longest: int = 3) -> None:
        self._sizes = range(longest, 0, -1)
        self._ends: dict[tuple[int, ...], list[int]] = {}  # of words that something follows
        self._known = 0

    def __call__(self, tokens: list[int], budget: int, depth: int) -> list[list[int]]:
        """Propose paths as `Drafter` does."""
        for end in range(self._known + 1, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._ends.setdefault(tuple(tokens[end - size : end]), []).append(end)
        self._known = max(self._known, len(tokens) - 1)
        for size in self._sizes:
            if ends := self._ends.get(tuple(tokens[-size:])):
                return self._paths(tokens, ends, budget, depth)
        return []

    def _paths(self, tokens: list[int], ends: list[int], budget: int, depth: int) -> list[list[int]]:
        other = next((end for end in reversed(ends) if tokens[end] != tokens[ends[-1]]), None)
        places = [ends[-1]] if other is None or budget < 2 else [ends[-1], other]
        longest = min(depth, budget // len(places))
        return [tokens[place : place + longest] for place in places if longest]


class ModelDrafts:
    """What a small model says: one path, its likeliest tokens. It runs on the rank that asks, alone.

    vocab_size: of the model that is drafted for. capacity: tokens of the longest text. device: where the
    small model computes. Raises `ArgumentError` for what is no model, or one of another vocabulary.
    """

    def __init__(self, directory: str | Path, vocab_size: int, capacity: int, *, device: str = "cpu") -> None:
        self._model, self._capacity = Llama(directory, device=device), capacity
        config = self._model.config
        if config.vocab_size != vocab_size:
            raise ArgumentError(
                f"{directory}: config.json's vocab_size is {config.vocab_size}, that of the model is "
                f"{vocab_size}: a draft model has the vocabulary of the model that it drafts for"
            )
        if config.max_position_embeddings < capacity:
            raise ArgumentError(
                f"{directory}: was made for {config.max_position_embeddings} tokens, not {capacity}"
            )
        self._session: Session | None = None
        self._cached: list[int] = []

    def __call__(self, tokens: list[int], budget: int, depth: int) -> list[list[int]]:
        """Propose a path as `Drafter` does."""
        path: list[int] = []
        logits = self._logits_after(tokens)
        for _ in range(min(budget, depth)):
            path.append(int(logits.argmax()))
            if len(path) < min(budget, depth):
                logits = self._step(path[-1])
        return [path] if path else []

    def close(self) -> None:
        """Release what its session planned."""
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> ModelDrafts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _logits_after(self, tokens: list[int]) -> Array:
        """Logits of what follows `tokens`; drafts that were not kept are rolled back first."""
        if self._session is None:
            alone = communicators.alone()
            self._session = Session(alone, self._model, tokens, capacity=self._capacity)
            self._cached = list(tokens)
            return self._session.prefill()
        pairs = enumerate(zip(self._cached, tokens[:-1], strict=False))
        same = next((n for n, (had, has) in pairs if had != has), min(len(self._cached), len(tokens) - 1))
        self._session.rollback(same)
        del self._cached[same:]
        for token in tokens[same:]:
            logits = self._step(token)
        return logits

    def _step(self, token: int) -> Array:
        assert self._session is not None
        self._cached.append(token)
        return self._session.step(token)


def draft_tree(last: int, paths: Sequence[Sequence[int]], nodes: int) -> TokenTree:
    """A tree of `nodes` slots whose root is the last token, which is in no cache yet; drafts follow it."""
    tree = TokenTree.from_paths([[last, *path] for path in paths])
    spare = ((0, 0), (0, nodes - tree.nodes))
    tokens, parents = np.pad(tree.tokens, spare), np.pad(tree.parents, spare, constant_values=-1)
    return TokenTree.from_parents(tokens, parents, tree.lengths)
