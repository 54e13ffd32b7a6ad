"""A text in the making over a sharded cache: prefill once, then token by token.

Every rank runs the whole model on the new token, and holds the keys and values of some positions; attention
over all of them is `treeattn.Decoder`. Tokens are chosen on rank 0 and broadcast, so that ranks cannot
disagree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn import comm as comm_
from treeattn.attention.positions import Runs, as_runs
from treeattn.cache import ShardedCache
from treeattn.decoder import Decoder
from treeattn.errors import ArgumentError
from treeattn.llama.model import Llama
from treeattn.llama.prefill import PREFILLS
from treeattn.shards import parse_layout

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Session"]


class Session:
    """One sequence of at most `capacity` tokens. Collective, as all of its methods are.

    prompt: token numbers, the same on every rank. scheme: of `treeattn.decode`, rings too. prefill: a name of
    `PREFILLS`. layout: who holds which token of the prompt; a token that comes later lies on rank position
    mod size.

    Raises `ArgumentError` for a prompt that is empty, longer than the capacity, or not of this model's
    vocabulary, on every rank alike.
    """

    def __init__(
        self,
        comm: Intracomm | None,
        model: Llama,
        prompt: Any,
        *,
        capacity: int,
        scheme: str = "hierarchical",
        prefill: str = "ring",
        layout: str = "zigzag",
    ) -> None:
        self._comm, self._model = comm_.intracomm(comm), model
        config = model.config
        with comm_.Agreement(self._comm) as agreed:
            self._prompt = _checked(prompt, capacity, config.vocab_size, config.max_position_embeddings)
            if prefill not in PREFILLS:
                raise ArgumentError(f"prefill {prefill!r} is unknown: use one of {', '.join(PREFILLS)}")
            chosen = parse_layout(layout)
            agreed.equal = {"the prompt": self._prompt.tobytes(), "capacity": capacity, "layout": layout}
        size, n = self._comm.size, len(self._prompt)
        self._shards = [as_runs(chosen.runs(n, rank, size)) for rank in range(size)]
        self._own: Runs = self._shards[self._comm.rank]
        self._prefill = PREFILLS[prefill](self._comm, config, self._shards)
        owners = np.arange(capacity) % size
        for rank, runs in enumerate(self._shards):
            owners[runs.positions()] = rank
        heads: dict[str, Any] = {"kv_heads": config.kv_heads, "head_dim": config.head_dim, "dtype": "float32"}
        first = ShardedCache(self._comm, capacity=capacity, layout=owners, **heads)
        self._caches = [first, *(first.another() for _ in range(1, config.layers))]
        self.tokens, self._capacity = n, capacity
        self.decoder = Decoder(self._comm, heads=config.heads, scheme=scheme, **heads)

    @property
    def cache_bytes(self) -> int:
        """Of this rank's share of keys and values."""
        return sum(int(cache.k.nbytes + cache.v.nbytes) for cache in self._caches)

    def prefill(self) -> Any:
        """Run the prompt: logits [vocab_size] of what follows it, on every rank."""
        positions = self._own.positions()
        hidden = self._model.run(self._prompt[positions], positions, self._attend_prompt)
        last = next(rank for rank, runs in enumerate(self._shards) if runs.end == self.tokens)
        logits = self._model.logits(hidden[-1:])[0] if self._comm.rank == last else None
        found = np.empty(self._model.config.vocab_size, np.float32) if logits is None else logits
        self._comm.Bcast(found, root=last)
        return found

    def step(self, token: int) -> Any:
        """Take one more token: logits [vocab_size] of what follows. Raises `ArgumentError` where the cache is
        full."""
        if self.tokens == self._capacity:
            raise ArgumentError(f"the cache is full: it was planned for {self._capacity} tokens")
        position = np.array([self.tokens])
        hidden = self._model.run(np.array([token]), position, self._attend_token)
        self.tokens += 1
        return self._model.logits(hidden)[0]

    def choose(self, logits: Any) -> int:
        """The likeliest token, as rank 0 sees it."""
        chosen: int = self._comm.bcast(int(logits.argmax()) if self._comm.rank == 0 else None)
        return chosen

    def close(self) -> None:
        """Release the decoder."""
        self.decoder.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.decoder.__exit__(*exception)

    def _attend_prompt(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        self._caches[layer].append_own(k[None], v[None], [self.tokens])
        return self._prefill(q, k, v)

    def _attend_token(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        cache = self._caches[layer]
        cache.append(k[None], v[None])
        end = int(cache.lengths[0])  # rings send what they are given: nothing of the spare room
        out, _ = self.decoder(q[None], cache.k[:, :end], cache.v[:, :end])
        return out[0]


def _checked(prompt: Any, capacity: int, vocabulary: int, longest: int) -> Any:
    tokens = np.asarray(prompt)
    if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
        raise ArgumentError("the prompt must be at least one token number")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ArgumentError(
            f"the prompt has token {int(tokens.max())}, the model's vocabulary ends at {vocabulary - 1}: "
            "the tokenizer belongs to another model"
        )
    if not len(tokens) <= capacity <= longest:
        raise ArgumentError(
            f"{len(tokens)} tokens of prompt, room for {capacity}: the model was made for at most {longest}"
        )
    return tokens.astype(np.int64)
