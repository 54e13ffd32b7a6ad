"""A generation session over a sharded cache: prefill once, then token by token.

Every rank runs the model on the new token, all of its weights or its part of them, and holds the keys and
values of some positions, on the device of its model; attention over all of them is `treeattn.Decoder`. Tokens
are chosen on rank 0 and broadcast, so that ranks cannot disagree.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from treeattn.attention.positions import as_runs
from treeattn.cache import ShardedCache
from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.communicator import Communicator, Given
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import Decoder, Prefill
from treeattn.decoder.request import Reduction
from treeattn.errors import ArgumentError
from treeattn.llama.model import Attend, Llama
from treeattn.llama.tensor_parallel import Tokens
from treeattn.mpi import communicators, library
from treeattn.mpi.communicators import Agreement, broadcast_from_root
from treeattn.partial import Array
from treeattn.selection import select
from treeattn.shards import parse_layout
from treeattn.token_tree import Accepted, TokenTree, Verifier, accept_greedy


class Session:
    """One sequence of at most `capacity` cached tokens. Collective, as all of its methods are.

    `comm`, `model`, `prompt_tokens` and `capacity` are as given; `tokens` says how many the cache has, and
    `attention_s` how many seconds attention of the steps took so far with its communication: on a GPU, which
    is not waited for, it says nothing.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or torch.distributed.ProcessGroup, optional
        The ranks, COMM_WORLD unless given; those of a model whose weights are sharded.
    prompt : integers [tokens]
        The same on every rank.
    capacity : int
        Tokens that the cache has room for; the last token of a text needs none.
    scheme : str, Schedule or Reduction, optional
        As for `treeattn.decode`, rings too, and with sharded weights those that leave each rank its heads;
        unless given `head_scatter` with sharded weights.
    layout : str
        Which rank holds which token of the prompt; a later token lies on rank position mod size.
    drafts : int
        Slots of the trees that `verify` takes. They are reduced by `scheme`, by the default where that
        leaves each rank its heads, and by none that attends while it communicates.

    With a model made `reproducible` every logit has the same bits on whatever ranks, layout and scheme, and
    with or without drafts, on like processors.

    Raises
    ------
    ArgumentError
        The same on every rank: for a prompt that is empty, longer than the capacity, or not of this model's
        vocabulary, and for arguments or models that differ between ranks.
    """

    def __init__(
        self,
        comm: Given,
        model: Llama,
        prompt: Sequence[int] | Tokens,
        *,
        capacity: int,
        scheme: str | Schedule | Reduction | None = None,
        layout: str = "zigzag",
        drafts: int = 0,
    ) -> None:
        comm, config, sharded = communicators.intracomm(comm), model.config, model.comm is not None
        with Agreement(comm, "Session") as agreed:
            how = trees = Reduction.of("head_scatter" if sharded and scheme is None else scheme)
            if sharded and how.scheme is not None and select(how.scheme).row.scattered:
                how, trees = replace(how, output="heads"), replace(how, scheme=None)
            self.comm, self.model, self.capacity = comm, model, capacity
            self.prompt_tokens = _checked_prompt(prompt, capacity, model)
            self.tokens, self.attention_s = len(self.prompt_tokens), 0.0
            self._dtype = model.dtype  # of keys and values, and of the queries that meet them
            if model.comm is not None and not _same_ranks(model.comm, comm):
                raise ArgumentError("the model's weights are sharded over other ranks than the session's")
            rule, size = parse_layout(layout), comm.size
            self._shards = [as_runs(rule.runs(len(self.prompt_tokens), rank, size)) for rank in range(size)]
            agreed.must_match = {
                "the prompt": f"{hashlib.sha256(self.prompt_tokens.tobytes()).hexdigest():.16} (its SHA-256)",
                "capacity": capacity,
                "layout": layout,
                "sharded weights": sharded,
                "reproducible": model.reproducible,
                **{f"the model's {name}": value for name, value in structs.asdict(config).items()},
                "the digest of the model's norms": f"{model.norms_digest:.16}",
            }
        cached: dict[str, Any] = {"kv_heads": config.kv_heads, "head_dim": model.cache_head_dim}
        cached |= {"dtype": self._dtype, "device": model.device.name}
        owners = np.arange(capacity) % size
        for rank, runs in enumerate(self._shards):
            owners[runs.positions()] = rank
        self._laid_out: dict[str, Any] = {"capacity": capacity, "layout": owners, "drafts": drafts}
        self._cache = ShardedCache(comm, layers=config.layers, **self._laid_out, **cached)
        # The scale is the model's own, whatever zeros fill its heads up to. Bits are those of tokens: a text
        # grows by single ones, not by blocks.
        self._attention = cached | {"heads": config.heads, "scale": 1.0 / math.sqrt(config.head_dim)}
        self._attention["reproducible"] = "tokens" if model.reproducible else None
        # First, since it refuses schemes that a decoder takes: then there is no decoder to close.
        self._verifier = Verifier(comm, nodes=drafts, scheme=trees, **self._attention) if drafts else None
        self.decoder = Decoder(comm, scheme=how, **self._attention)

    @property
    def tree_decoder(self) -> Decoder | None:
        """The decoder that reduces the trees of `verify`; None where none were planned."""
        return None if self._verifier is None else self._verifier.decoder

    @property
    def cache_bytes(self) -> int:
        """Bytes of this rank's share of keys and values."""
        return sum(held.nbytes for cache in self._cache.layers for held in cache.arrays)

    def prefill(self, on_layer: Callable[[int], object] = lambda layer: None) -> Array:
        """Run the prompt: logits [vocab_size] of what follows it, on every rank. on_layer: called with the
        number of every layer whose attention is done. Raises `ArgumentError` the second time."""
        if self._cache.totals[0]:
            raise ArgumentError("the prompt is in the cache already: a session has one")
        if self.tokens != len(self.prompt_tokens):
            raise ArgumentError("the prompt was taken back: make a new session to run it")
        model, runs = self.model, self._shards[self.comm.rank]
        own = runs.positions()  # of the prompt's tokens that this rank runs
        prompt: dict[str, Any] = {"tokens": len(own), "positions": runs}

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            cache = self._cache.layers[layer]
            cache.append_own(k[None], v[None], [self.tokens])
            closer = (rows[:, : len(q)] for rows in cache.arrays)
            attended: Array = prefill(q[None], *closer)[0][0]
            on_layer(layer)
            return attended

        with Prefill(self.comm, **prompt, **self._attention) as prefill:
            hidden = model.forward(
                self.prompt_tokens[own], own, attend, sequence_parallel=True, dtype=self._dtype
            )
        root = next(rank for rank, runs in enumerate(self._shards) if runs.end == self.tokens)
        last: Array = np.empty((1, model.config.hidden_size), np.float32)
        if self.comm.rank == root:
            last = model.device.to_host(hidden[-1:])
        with watchdog.Activity("the prompt's last token"):
            self.comm.bcast_array(last, root)
        logits: Array = model.logits(model.device.from_host(last))[0]
        return logits

    def step(self, token: int) -> Array:
        """Take one more token: logits [vocab_size] of what follows. Raises `ArgumentError` where the cache is
        full, without the prompt, or for what is no token of the model."""
        attend, new = self._attend_next(), np.array([token])
        _check_tokens("the step", new, self.model.config.vocab_size)
        hidden = self.model.forward(new, np.array([self.tokens]), attend, dtype=self._dtype)
        self.tokens += 1
        logits: Array = self.model.logits(hidden)[0]
        return logits

    def _attend_next(self) -> Attend:
        """How one more token attends. Raises `ArgumentError` where there can be none."""
        self._check_prefilled()
        if self.tokens == self.capacity:
            raise ArgumentError(f"the cache is full: it was planned for {self.capacity} tokens")

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            self._cache.layers[layer].append(k[None], v[None])
            return self._timed(self.decoder, layer, q)

        return attend

    def verify(self, tree: TokenTree) -> Array:
        """Run the nodes of a tree [1, drafts], whose root is the last token: logits [drafts, vocab_size] of
        what follows each. `commit` says what is kept. Raises `ArgumentError` for a tree of another size,
        or what is no token of the model."""
        attend = self._attend_tree(tree)
        _check_tokens("the tree", tree.tokens[0], self.model.config.vocab_size)
        positions = self.tokens + tree.depths[0]
        return self.model.logits(self.model.forward(tree.tokens[0], positions, attend, dtype=self._dtype))

    def _attend_tree(self, tree: TokenTree) -> Attend:
        """How the nodes of a tree attend. Raises `ArgumentError` where they cannot."""
        verifier = self._verifier
        if verifier is None or tree.nodes != verifier.shape.queries or tree.batch != 1:
            raise ArgumentError(f"{tree}: the session was planned without trees, or for others: see drafts=")
        self._check_prefilled()
        lengths = self._cache.shard_lengths

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            self._cache.layers[layer].propose(k[None], v[None], tree)
            return self._timed(verifier, layer, q, k[None], v[None], tree, shard_lengths=lengths)

        return attend

    def _timed(
        self, attention: Decoder | Verifier, layer: int, q: Array, *drafts: Any, **options: Any
    ) -> Array:
        cache = self._cache.layers[layer]
        end = int(cache.lengths[0])  # rings send what they are given: nothing of the spare room
        began = time.perf_counter()
        k, v = (array[:, :end] for array in cache.arrays)
        out, _ = attention(q[None], k, v, *drafts, **options)
        self.attention_s += time.perf_counter() - began
        attended: Array = out[0]
        return attended

    def commit(self, path: NDArray[np.integer[Any]]) -> None:
        """Keep the nodes on a path of the tree, as `Accepted.path` has it, and forget the others."""
        for cache in self._cache.layers:
            cache.commit(path)
        self.tokens = int(self._cache.totals[0])

    def rollback(self, tokens: int) -> None:
        """Forget all but the first `tokens` tokens. Raises `ArgumentError` for more than there are."""
        for cache in self._cache.layers:
            cache.rollback([tokens])
        self.tokens = tokens

    def choose(self, logits: Array) -> int:
        """The likeliest token by logits [vocab_size], as rank 0 sees them. Raises `ArgumentError` for NaN."""
        chosen = broadcast_from_root(self.comm, lambda: _likeliest(logits), "the token that rank 0 chooses")
        return int(chosen)

    def accept(self, tree: TokenTree, logits: Array) -> Accepted:
        """Which nodes of a tree are kept by logits [drafts, vocab_size] of `verify`, as rank 0 sees them, and
        the token after them: what the model would have said without drafts."""
        what = "the tokens that rank 0 chooses"
        chosen = broadcast_from_root(self.comm, lambda: _likeliest(logits), what)
        return accept_greedy(tree, chosen[None], comm=self.comm)

    def close(self) -> None:
        """Release what was planned. Collective."""
        self.decoder.close()
        if self._verifier is not None:
            self._verifier.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.decoder.__exit__(*exception)
        if self._verifier is not None:
            self._verifier.__exit__(*exception)

    def _check_prefilled(self) -> None:
        """Layers come one after the other: the first and the last say whether an exception came between."""
        first, last = (int(self._cache.layers[layer].totals[0]) for layer in (0, -1))
        if first == last == 0 != self.tokens:
            raise ArgumentError("the prompt is not in the cache yet: call prefill first")
        if not first == last == self.tokens:
            raise ArgumentError(
                f"the first layer has {first} tokens in its cache, the last one {last}: an exception ended a "
                "prefill or step between them; make a new session"
            )


def _likeliest(logits: Array) -> Tokens:
    """Tokens [..] by logits [.., vocab_size]. Raises `ArgumentError` for NaN."""
    tokens = np.asarray(logits.argmax(-1), np.int64)
    if np.isnan(np.take_along_axis(logits, tokens[..., None], -1)).any():  # NumPy's largest number
        raise ArgumentError("logits are NaN: the model's weights, or its sums, overflow")
    return tokens


def _same_ranks(one: Communicator, other: Communicator) -> bool:
    if one.library != "mpi" or other.library != "mpi":
        return False
    mpi = library.load()
    return mpi.Comm.Compare(one, other) in (mpi.IDENT, mpi.CONGRUENT)


def _checked_prompt(prompt: Sequence[int] | Tokens, capacity: int, model: Llama) -> Tokens:
    tokens, longest = np.asarray(prompt), model.config.max_position_embeddings
    if tokens.ndim != 1 or not tokens.size:
        raise ArgumentError("the prompt must be at least one token number")
    _check_tokens("the prompt", tokens, model.config.vocab_size)
    if not len(tokens) <= capacity <= longest:
        raise ArgumentError(
            f"{len(tokens)} tokens of prompt, room for {capacity}: the model was made for at most {longest}"
        )
    return tokens.astype(np.int64)


def _check_tokens(what: str, tokens: NDArray[Any], vocabulary: int) -> None:
    """An index below 0 would be another token's, and one past the end in no rank's part of the weights."""
    if tokens.dtype.kind not in "iu":
        raise ArgumentError(f"{what} has {tokens.dtype}: token numbers are whole")
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if outside.size:
        raise ArgumentError(
            f"{what} has token {int(outside[0])}, the model's vocabulary ends at {vocabulary - 1}: "
            "the tokenizer belongs to another model"
        )
