"""Both ends of a model: token numbers to vectors, vectors to logits; whole, or rows dealt out over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn.backends.cpu import PlannedProduct
from treeattn.llama.linear import Axis, Ranks

__all__ = ["DealtVocabulary", "Vocabulary"]

_BLOCK = 1024  # tokens that travel at once


class Vocabulary:
    """embedding and head [vocab_size, hidden_size]; the same array where they are tied."""

    def __init__(self, embedding: Any, head: Any) -> None:
        self.embedding, self.head = embedding, head
        self._product = PlannedProduct(head)

    def vectors(self, tokens: Any, dealt: bool = False) -> Any:
        """Of tokens [tokens], float32 [tokens, hidden_size]. Every rank passes the same, or its own
        (`dealt`); collective where rows are dealt out."""
        return self.embedding[tokens]

    def logits(self, hidden: Any) -> Any:
        """float32 [tokens, vocab_size] of hidden [tokens, hidden_size], the same on every rank. Collective
        where rows are dealt out."""
        return self._product(hidden)

    @property
    def arrays(self) -> list[Any]:
        """What this rank holds."""
        return [self.embedding] if self.head is self.embedding else [self.embedding, self.head]


class DealtVocabulary(Vocabulary):
    """Every rank holds the rows of some tokens."""

    def __init__(self, ranks: Ranks, tokens: Axis, embedding: Any, head: Any) -> None:
        super().__init__(embedding, head)
        self._ranks, self._tokens, self._own = ranks, tokens, tokens.part(ranks.rank, ranks.size)

    def vectors(self, tokens: Any, dealt: bool = False) -> Any:
        """As `Vocabulary.vectors`: one rank has a token's vector, the others add 0."""
        if not dealt:
            return self._ranks.total(self._known(tokens))
        mine = np.empty((len(tokens), self.embedding.shape[1]), np.float32)
        with self._ranks.waits:
            wanted = self._ranks.comm.allgather(tokens)
        for root, theirs in enumerate(wanted):
            for begin in range(0, len(theirs), _BLOCK):
                into = mine[begin : begin + _BLOCK] if self._ranks.rank == root else None
                known = self._known(theirs[begin : begin + _BLOCK])
                with self._ranks.waits:
                    self._ranks.comm.Reduce(known, into, root=root)
        return mine

    def logits(self, hidden: Any) -> Any:
        """As `Vocabulary.logits`."""
        return self._ranks.together(super().logits(hidden).T, self._tokens).T

    def _known(self, tokens: Any) -> Any:
        vectors = np.zeros((len(tokens), self.embedding.shape[1]), np.float32)
        here = (tokens >= self._own.start) & (tokens < self._own.stop)
        vectors[here] = self.embedding[tokens[here] - self._own.start]
        return vectors
