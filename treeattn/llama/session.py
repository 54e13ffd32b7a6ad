"""A text in the making over a sharded cache: prefill once, then token by token.

Every rank runs the model on the new token, all of its weights or its part of them, and holds the keys and
values of some positions, on the device of its model; attention over all of them is `treeattn.Decoder`. Tokens
are chosen on rank 0, likeliest or drawn, and broadcast, so that ranks cannot disagree.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn import comm as comm_
from treeattn.attention.positions import Runs, as_runs
from treeattn.cache import ShardedCache
from treeattn.collectives import waiting
from treeattn.decoder import Decoder
from treeattn.decoder.plan import select
from treeattn.errors import ArgumentError
from treeattn.llama.heads import Heads
from treeattn.llama.model import Attend, Llama
from treeattn.llama.prefill import PREFILLS
from treeattn.llama.sampling import Sampling
from treeattn.shards import parse_layout
from treeattn.token_tree import Accepted, TokenTree, Verifier, accept_greedy, accept_sample
from treeattn.token_tree.accept import drawn

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Session"]


class Session:
    """One sequence of at most `capacity` tokens. Collective, as all of its methods are.

    `tokens` says how many of at most `capacity` the cache has, `attention_s` how many seconds attention of
    the steps took so far, with its communication; on a GPU, which is not waited for, it says nothing.

    model: with weights that are sharded, over these ranks. prompt: token numbers, the same on every rank.
    scheme: of `treeattn.decode`, rings too, and with sharded weights those that leave each rank its heads;
    None: `head_scatter` with sharded weights, else `hierarchical`. prefill: a name of
    `PREFILLS`. layout: who holds which token of the prompt; a token that comes later lies on rank position
    mod size. drafts: slots of the trees that `verify` takes; trees are reduced by `scheme`, by `hierarchical`
    where it is None, and by none that attends while it communicates or leaves each rank its heads.
    sampling: how tokens are chosen; the likeliest unless said. transport: how the records of attention travel
    from a model's GPU, as for `treeattn.decode`; several ranks have to name one.

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
        scheme: str | None = None,
        prefill: str = "ring",
        layout: str = "zigzag",
        drafts: int = 0,
        sampling: Sampling | None = None,
        transport: str | None = None,
    ) -> None:
        self._comm, self.model = comm_.intracomm(comm), model
        self._sampling = sampling or Sampling()
        config, sharded = model.config, model.comm is not None
        folding = scheme or "hierarchical"
        if scheme is None:
            scheme = "head_scatter" if sharded else "hierarchical"
        with comm_.Agreement(self._comm) as agreed:
            scattered = sharded and select(scheme).row.scattered
            self._generator = np.random.default_rng(self._sampling.seed)
            self._prompt = _checked(prompt, capacity, config.vocab_size, config.max_position_embeddings)
            if prefill not in PREFILLS:
                raise ArgumentError(f"prefill {prefill!r} is unknown: use one of {', '.join(PREFILLS)}")
            self._heads = Heads.of(config, model.device)
            if model.comm is not None and not _same_ranks(model.comm, self._comm):
                raise ArgumentError("the model's weights are sharded over other ranks than the session's")
            chosen = parse_layout(layout)
            agreed.equal = {
                "the prompt": f"{hashlib.sha256(self._prompt.tobytes()).hexdigest():.16} (its SHA-256)",
                "capacity": capacity,
                "layout": layout,
                "prefill": prefill,
                "sampling": self._sampling,
                "sharded weights": sharded,
                **{f"the model's {one.name}": getattr(config, one.name) for one in fields(config)},
                "the digest of the model's norms": f"{model.norms_digest:.16}",
            }
        size, n = self._comm.size, len(self._prompt)
        self._shards = [as_runs(chosen.runs(n, rank, size)) for rank in range(size)]
        self._own: Runs = self._shards[self._comm.rank]
        self._prefill = PREFILLS[prefill]
        owners = np.arange(capacity) % size
        for rank, runs in enumerate(self._shards):
            owners[runs.positions()] = rank
        heads = self._heads.planned
        first = ShardedCache(self._comm, capacity=capacity, layout=owners, drafts=drafts, **heads)
        others = comm_.together(self._comm, lambda: [first.another() for _ in range(1, config.layers)])
        self._caches = [first, *others]
        self.tokens, self.capacity = n, capacity
        heads |= {"heads": config.heads, "scale": self._heads.scale, "transport": transport}
        # First, since it refuses schemes that a decoder takes: then there is no decoder to close.
        self._verifier = Verifier(self._comm, nodes=drafts, scheme=folding, **heads) if drafts else None
        output = "heads" if scattered else "replicated"
        self.decoder = Decoder(self._comm, scheme=scheme, output=output, **heads)
        self.attention_s = 0.0

    @property
    def tree_decoder(self) -> Decoder | None:
        """What reduces the trees of `verify`; None where none were planned."""
        return None if self._verifier is None else self._verifier.decoder

    @property
    def cache_bytes(self) -> int:
        """Of this rank's share of keys and values."""
        return sum(int(cache.k.nbytes + cache.v.nbytes) for cache in self._caches)

    def prefill(self, told: Callable[[int], object] = lambda layer: None) -> Any:
        """Run the prompt: logits [vocab_size] of what follows it, on every rank. told: called with the number
        of every layer whose attention is done. Raises `ArgumentError` the second time."""
        if self._caches[0].totals[0]:
            raise ArgumentError("the prompt is in the cache already: a session has one")
        if self.tokens != len(self._prompt):
            raise ArgumentError("the prompt was taken back: make a new session to run it")

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            cache = self._caches[layer]
            cache.append_own(k[None], v[None], [self.tokens])
            attended = seen(q, *(rows[0, : len(q)] for rows in (cache.k, cache.v)))  # which lie closer there
            told(layer)
            return attended

        positions = self._own.positions()
        with self._prefill(self._comm, self._heads, self._shards) as seen:
            hidden = self._run(self._prompt[positions], positions, attend, dealt=True)
        last = next(rank for rank, runs in enumerate(self._shards) if runs.end == self.tokens)
        shape = 1, self.model.config.hidden_size
        device = self.model.device
        end = device.to_host(hidden[-1:]) if self._comm.rank == last else np.empty(shape, np.float32)
        with waiting.watched("the prompt's last token"):
            self._comm.Bcast(end, root=last)
        return self.model.logits(device.from_host(end))[0]

    def step(self, token: int) -> Any:
        """Take one more token: logits [vocab_size] of what follows. Raises `ArgumentError` where the cache is
        full, without the prompt, or for what is no token of the model."""
        self._check_read()
        if self.tokens == self.capacity:
            raise ArgumentError(f"the cache is full: it was planned for {self.capacity} tokens")
        position, new = np.array([self.tokens]), np.array([token])
        _check_tokens("the step", new, self.model.config.vocab_size)
        hidden = self._run(new, position, self._attend_token)
        self.tokens += 1
        return self.model.logits(hidden)[0]

    def verify(self, tree: TokenTree) -> Any:
        """Run the nodes of a tree [1, drafts], whose root is the last token: logits [drafts, vocab_size] of
        what follows each. `commit` says what is kept. Raises `ArgumentError` for a tree of another size,
        or what is no token of the model."""
        if self._verifier is None or tree.nodes != self._verifier.shape.queries or tree.batch != 1:
            raise ArgumentError(f"{tree}: the session was planned without trees, or for others: see drafts=")
        self._check_read()
        _check_tokens("the tree", tree.tokens[0], self.model.config.vocab_size)
        lengths = self._caches[0].shard_lengths
        positions = self._caches[0].draft_positions(tree)[0]

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            return self._attend_tree(layer, q, k, v, tree, lengths)

        return self.model.logits(self._run(tree.tokens[0], positions, attend))

    def commit(self, path: Any) -> None:
        """Keep the nodes on a path of the tree, as `Accepted.path` has it, and forget the others."""
        for cache in self._caches:
            cache.commit(path)
        self.tokens = int(self._caches[0].totals[0])

    def rollback(self, tokens: int) -> None:
        """Forget all but the first `tokens` tokens. Raises `ArgumentError` for more than there are."""
        for cache in self._caches:
            cache.rollback([tokens])
        self.tokens = tokens

    def choose(self, logits: Any) -> int:
        """The next token by logits [vocab_size], as rank 0 sees them. Raises `ArgumentError` where they
        let none be drawn."""

        def chosen() -> int:
            if self._sampling.greedy:
                return int(logits.argmax())
            return drawn(self._sampling.probabilities(logits), self._generator)

        return comm_.decided(self._comm, chosen, "the token that rank 0 chooses")

    def accept(self, tree: TokenTree, logits: Any) -> Accepted:
        """Which nodes of a tree are kept by logits [drafts, vocab_size] of `verify`, as rank 0 sees them, and
        the token after them. Tokens are those that `choose` would have chosen, one by one, whatever the
        drafts are: a draft is kept where it is what was drawn."""
        if self._sampling.greedy:
            said = logits.argmax(axis=1)[None].astype(np.int64)
            return accept_greedy(tree, said, comm=self._comm)
        counts = self._comm.rank == 0  # only there
        probabilities = self._sampling.probabilities(logits)[None] if counts else None
        return accept_sample(tree, probabilities, self._generator, comm=self._comm)

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

    def _check_read(self) -> None:
        """Layers come one after the other: the first and the last say whether an exception came between."""
        first, last = (int(self._caches[layer].totals[0]) for layer in (0, -1))
        if first == last == 0 != self.tokens:
            raise ArgumentError("the prompt is not in the cache yet: call prefill first")
        if not first == last == self.tokens:
            raise ArgumentError(
                f"the first layer has {first} tokens in its cache, the last one {last}: an exception ended a "
                "prefill or step between them; make a new session"
            )

    def _run(self, tokens: Any, positions: Any, attend: Attend, dealt: bool = False) -> Any:
        """The model, with heads as `attend` takes them."""
        heads = self._heads

        def filled(layer: int, *qkv: Any) -> Any:
            return heads.cut(attend(layer, *map(heads.filled, qkv)))

        return self.model.run(tokens, positions, filled, dealt)

    def _attend_token(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        cache = self._caches[layer]
        cache.append(k[None], v[None])
        end = int(cache.lengths[0])  # rings send what they are given: nothing of the spare room
        began = time.perf_counter()
        out, _ = self.decoder(q[None], cache.k[:, :end], cache.v[:, :end])
        self.attention_s += time.perf_counter() - began
        return out[0]

    def _attend_tree(self, layer: int, q: Any, k: Any, v: Any, tree: TokenTree, lengths: Any) -> Any:
        assert self._verifier is not None
        cache, drafts = self._caches[layer], (k[None], v[None])
        cache.propose(*drafts, tree)
        end = int(cache.lengths[0])
        shard = cache.k[:, :end], cache.v[:, :end]
        began = time.perf_counter()
        out, _ = self._verifier(q[None], *shard, *drafts, tree, shard_lengths=lengths)
        self.attention_s += time.perf_counter() - began
        return out[0]


def _same_ranks(one: Intracomm, other: Intracomm) -> bool:
    mpi = comm_.mpi()
    return mpi.Comm.Compare(one, other) in (mpi.IDENT, mpi.CONGRUENT)


def _checked(prompt: Any, capacity: int, vocabulary: int, longest: int) -> Any:
    tokens = np.asarray(prompt)
    if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
        raise ArgumentError("the prompt must be at least one token number")
    _check_tokens("the prompt", tokens, vocabulary)
    if not len(tokens) <= capacity <= longest:
        raise ArgumentError(
            f"{len(tokens)} tokens of prompt, room for {capacity}: the model was made for at most {longest}"
        )
    return tokens.astype(np.int64)


def _check_tokens(what: str, tokens: Any, vocabulary: int) -> None:
    """An index below 0 would be another token's, and one past the end nobody's part of the weights."""
    if tokens.dtype.kind not in "iu":
        raise ArgumentError(f"{what} has {tokens.dtype}: token numbers are whole")
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if outside.size:
        raise ArgumentError(
            f"{what} has token {int(outside[0])}, the model's vocabulary ends at {vocabulary - 1}: "
            "the tokenizer belongs to another model"
        )
