"""Both ends of a model: token numbers to vectors, vectors to logits; whole, or rows dealt out over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn.decoder.device import Device
from treeattn.llama.ranks import Axis, Ranks

__all__ = ["DealtVocabulary", "Vocabulary"]

_BLOCK = 1024  # tokens that travel at once


class Vocabulary:
    """embedding and head [vocab_size, hidden_size], of the device; the same array where they are tied."""

    def __init__(self, device: Device, embedding: Any, head: Any) -> None:
        self.device, self.embedding, self.head = device, embedding, head
        self._product = device.product(head)

    def vectors(self, tokens: Any, dealt: bool = False) -> Any:
        """Of tokens [tokens], which lie on the host: float32 [tokens, hidden_size] on the device. Every rank
        passes the same, or its own (`dealt`); collective where rows are dealt out."""
        return self.embedding[self.device.from_host(tokens)]

    def logits(self, hidden: Any) -> Any:
        """float32 [tokens, vocab_size] of hidden [tokens, hidden_size], the same on every rank: on the host,
        where tokens are chosen. Collective where rows are dealt out."""
        return self.device.readable(self._product(hidden))

    @property
    def arrays(self) -> list[Any]:
        """What this rank holds."""
        return [self.embedding] if self.head is self.embedding else [self.embedding, self.head]


class DealtVocabulary(Vocabulary):
    """Every rank holds the rows of some tokens."""

    def __init__(self, ranks: Ranks, tokens: Axis, embedding: Any, head: Any) -> None:
        super().__init__(ranks.device, embedding, head)
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
                known = self._ranks.on_host(self._known(theirs[begin : begin + _BLOCK]))
                with self._ranks.waits:
                    self._ranks.comm.Reduce(known, into, root=root)
        return self.device.from_host(mine)

    def logits(self, hidden: Any) -> Any:
        """As `Vocabulary.logits`."""
        return self._ranks.together(self._product(hidden).T, self._tokens).T

    def _known(self, tokens: Any) -> Any:
        vectors = self.device.namespace.zeros((len(tokens), self.embedding.shape[1]), np.float32)
        here = np.flatnonzero((tokens >= self._own.start) & (tokens < self._own.stop))
        if len(here):
            rows = self.device.from_host(tokens[here] - self._own.start)
            vectors[self.device.from_host(here)] = self.embedding[rows]
        return vectors
