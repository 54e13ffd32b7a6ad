"""A session whose keys and values lie on cache nodes: this process, rank 0, runs the model alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeattn import communicators
from treeattn.attention.shape import DTYPES
from treeattn.cache_nodes import CacheNodes
from treeattn.errors import ArgumentError
from treeattn.llama.model import Attend, Llama
from treeattn.llama.sampling import Sampling
from treeattn.llama.session import Session
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
        self._begin(communicators.alone(), model, prompt, capacity, sampling)
        config, self._dtype = model.config, model.dtype
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

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            attended = self._asked(self._remote.step, layer, q, k, v)
            on_layer(layer)
            return attended

        positions = np.arange(self.tokens)
        hidden = self.model.forward(self.prompt_tokens, positions, attend, dtype=self._dtype)
        logits: Array = self.model.logits(hidden[-1:])[0]
        return logits

    def _attend_next(self) -> Attend:
        if int(self._remote.totals.min()) != self.tokens:
            raise ArgumentError("the prompt is not in the cache yet: call prefill first")
        return partial(self._asked, self._remote.step)

    def _attend_tree(self, tree: TokenTree) -> Attend:
        """Of any size."""
        self._drafts: list[tuple[Array, Array]] = []

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            self._drafts.append((k[None].copy(), v[None].copy()))
            return self._asked(partial(self._remote.verify, tree=tree), layer, q, k, v)

        return attend

    def _asked(
        self, ask: Callable[..., tuple[Array, Array]], layer: int, q: Array, k: Array, v: Array
    ) -> Array:
        began = time.perf_counter()
        out, _ = ask(layer, q[None], k[None], v[None], scale=1.0 / math.sqrt(self.model.config.head_dim))
        self.attention_s += time.perf_counter() - began
        attended: Array = out[0]
        return attended

    def commit(self, path: NDArray[np.integer[Any]]) -> None:
        """As of `Session`: what is kept goes to the nodes."""
        kept = path[:, path[0] >= 0][0]
        for layer, (k, v) in enumerate(self._drafts):
            self._remote.append(layer, k[:, kept], v[:, kept])
        self.tokens += len(kept)

    def rollback(self, tokens: int) -> None:
        self._remote.rollback([tokens])
        self.tokens = tokens

    def close(self) -> None:
        """The nodes have the memory back when the next cache is planned."""

    def __exit__(self, *exception: Any) -> None:
        self.close()
