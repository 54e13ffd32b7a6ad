"""A session whose keys and values lie on cache nodes: this process, rank 0, runs the model alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeattn import communicators
from treeattn.attention.shape import DTYPES
from treeattn.cache_nodes import CacheNodes
from treeattn.errors import ArgumentError
from treeattn.llama.model import Llama
from treeattn.llama.sampling import Sampling
from treeattn.llama.session import Session, _check_tokens, _checked_prompt
from treeattn.llama.tensor_parallel import Tokens
from treeattn.partial import Array
from treeattn.token_tree import TokenTree


class RemoteSession(Session):
    """One sequence of at most `capacity` tokens on `nodes`; the rest as of `Session`.

    Raises `ArgumentError` for a model on a GPU or over several ranks, and where the nodes have no room.
    """

    def __init__(
        self,
        nodes: CacheNodes,
        model: Llama,
        prompt: Sequence[int] | Tokens,
        *,
        capacity: int,
        sampling: Sampling | None = None,
    ) -> None:
        if model.device.name != "cpu" or model.comm is not None:
            raise ArgumentError("a model over cache nodes runs on the processor, whole on one rank")
        config = model.config
        self.comm, self.model, self.capacity = communicators.alone(), model, capacity
        self._sampling = sampling or Sampling()
        self._generator = np.random.default_rng(self._sampling.seed)
        self.prompt_tokens = _checked_prompt(prompt, capacity, model)
        self.tokens, self.attention_s = len(self.prompt_tokens), 0.0
        self._remote = nodes.cache(
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=model.cache_head_dim,
            dtype=model.dtype,
            capacity=capacity,
        )
        numbers = model.cache_head_dim * (config.heads + 2 * config.kv_heads)
        down = 64 + DTYPES[model.dtype].itemsize * numbers
        sent = [(child, down) for child in nodes.children]
        shape = SimpleNamespace(head_dim=model.cache_head_dim, dtype=model.dtype)
        self.decoder: Any = SimpleNamespace(
            scheme=nodes.schedule.name, transport="mpi", sent=sent, shape=shape
        )

    @property
    def tree_decoder(self) -> None:
        """None: drafts are verified in steps as of tokens."""
        return

    @property
    def cache_bytes(self) -> int:
        """None of it is here."""
        return 0

    def prefill(self, on_layer: Callable[[int], object] = lambda layer: None) -> Array:
        """As of `Session`: the prompt goes to the nodes in pieces."""
        if self._remote.totals.any():
            raise ArgumentError("the prompt is in the cache already: a session has one")
        hidden = self._forward(self.prompt_tokens, np.arange(self.tokens), self._remote.step, on_layer)
        logits: Array = self.model.logits(hidden[-1:])[0]
        return logits

    def step(self, token: int) -> Array:
        if int(self._remote.totals.min()) != self.tokens:
            raise ArgumentError("the prompt is not in the cache yet: call prefill first")
        new = np.array([token])
        _check_tokens("the step", new, self.model.config.vocab_size)
        hidden = self._forward(new, np.array([self.tokens]), self._remote.step)
        self.tokens += 1
        logits: Array = self.model.logits(hidden)[0]
        return logits

    def verify(self, tree: TokenTree) -> Array:
        """As of `Session`, for trees of any size."""
        _check_tokens("the tree", tree.tokens[0], self.model.config.vocab_size)
        self._drafts: list[tuple[Array, Array]] = []

        def ask(layer: int, q: Array, k: Array, v: Array, **how: Any) -> tuple[Array, Array]:
            self._drafts.append((k.copy(), v.copy()))
            return self._remote.verify(layer, q, k, v, tree, **how)

        return self.model.logits(self._forward(tree.tokens[0], self.tokens + tree.depths[0], ask))

    def commit(self, path: NDArray[np.integer[Any]]) -> None:
        """As of `Session`: what is kept goes to the nodes."""
        kept = path[:, path[0] >= 0][0]
        for layer, (k, v) in enumerate(self._drafts):
            self._remote.append(layer, k[:, kept], v[:, kept])
        self.tokens += len(kept)

    def _forward(
        self,
        tokens: Any,
        positions: Any,
        ask: Callable[..., tuple[Array, Array]],
        on_layer: Callable[[int], object] = lambda layer: None,
    ) -> Array:
        scale = 1.0 / math.sqrt(self.model.config.head_dim)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            began = time.perf_counter()
            out, _ = ask(layer, q[None], k[None], v[None], scale=scale)
            self.attention_s += time.perf_counter() - began
            on_layer(layer)
            attended: Array = out[0]
            return attended

        return self.model.forward(tokens, positions, attend, dtype=self.model.dtype)

    def rollback(self, tokens: int) -> None:
        self._remote.rollback([tokens])
        self.tokens = tokens

    def close(self) -> None:
        """The nodes have the memory back when the next cache is planned."""

    def __exit__(self, *exception: Any) -> None:
        self.close()
