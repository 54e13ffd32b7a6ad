"""A decode problem that lies in a file: its query, and this rank's shard of its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from treeattn import files, reference
from treeattn.attention.arguments import CacheFormat, Rules
from treeattn.attention.shape import Shape, dtype_name
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.errors import ArgumentError
from treeattn.mpi.communicators import collectively, must_match
from treeattn.partial import Array
from treeattn.report import Progress
from treeattn.shards import Layout


class Problem:
    """The q of a file, whole, and this rank's shard of its k, v and lengths. Creating it is collective.

    shape, scale, rules: of the whole. tokens: of a sequence, at most. positions [tokens of the shard]:
    where these lie in the sequence. q_positions [batch, queries]: queries are the last tokens of each.
    Raises the same `ArgumentError` on every rank.
    """

    def __init__(self, world: Communicator, source: Path, layout: Layout) -> None:
        self.source, self.layout = source, layout
        collectively(world, lambda: self._open(world))
        same = (self.shape, self.tokens, self.scale, repr(self.rules), source.stat().st_size)
        must_match(world, {"the input file": same})
        self._load(world.rank == 0)

    def _open(self, world: Communicator) -> None:
        file = self.file = files.open_cache(self.source)
        for name in "qkv":
            if file[name].ndim != 4:
                shape = list(file[name].shape)
                raise ArgumentError(f"{self.source}: {name} has shape {shape}, expected four axes")
        (batch, queries, heads, head_dim), (_, self.tokens, kv_heads, _) = file["q"].shape, file["k"].shape
        self.shape = Shape(batch, queries, heads, kv_heads, head_dim, dtype_name(file["q"]))
        self.shape.check_query(file["q"])
        self.shape.check_cache(file["k"], file["v"])
        self.scale = self.shape.logit_scale(file.scale())
        self.rules = self._rules()
        self._runs = self.layout.runs(self.tokens, world.rank, world.size)
        self.positions = np.concatenate([np.arange(self.tokens)[run] for run in (slice(0), *self._runs)])
        ends: Array = np.full(batch, self.tokens)
        self.lengths = None
        if "lengths" in file.tensors:
            ends = self.shape.check_lengths(file["lengths"], self.tokens)
            self.lengths = self.layout.shard_lengths(ends, self.tokens, world.rank, world.size)
        if self.rules.positional and ((ends > 0) & (ends < queries)).any():
            raise ArgumentError(
                f"{self.source}: a sequence is shorter than its {queries} queries, its last tokens"
            )
        self.q_positions = np.maximum(ends[:, None] - queries + np.arange(queries), 0)

    def _rules(self) -> Rules:
        """Rules by the tensors causal [] and window [2], of which -1 is unbounded, as in flash-attention."""
        given = self.file.tensors
        causal, window = (np.asarray(given.get(name, none)) for name, none in (("causal", 0), ("window", [])))
        if causal.size != 1 or causal.item() not in (0, 1):
            raise ArgumentError(f"{self.source}: causal must be one 0 or 1, not {causal.tolist()!s:.60}")
        if window.shape not in ((0,), (2,)) or (window.size and window.dtype.kind not in "iu"):
            raise ArgumentError(
                f"{self.source}: window must be whole numbers [2], the tokens before and behind itself a "
                f"query sees (-1: all), not {window.dtype} {list(window.shape)}"
            )
        left, right = (None if side == -1 else side for side in window.tolist() or (-1, -1))
        return Rules(causal=bool(causal), window=(left, right) if window.size else None)

    def _load(self, shown: bool) -> None:
        self.q, done, say = np.array(self.file["q"]), 0, Progress(shown)
        total = sum(self.file[name].nbytes for name in "kv") * len(self.positions) // max(self.tokens, 1)

        def advance(size: int) -> None:
            nonlocal done
            done += size
            say(f"reading the shard of rank 0: {done / total:.0%} of {total:,} bytes")

        self.k, self.v = (files.load_runs(self.file[name], self._runs, advance) for name in "kv")

    @property
    def described(self) -> dict[str, Any]:
        """The problem as JSON has it."""
        return {
            "input": str(self.source),
            "tokens": self.tokens,
            "layout": str(self.layout),
            "scale": self.scale,
            "shape": self.shape.plain,
            "rules": {name: getattr(self.rules, name) for name in self.rules.names},
        }

    @property
    def held(self) -> str:
        """What the cache holds, in words."""
        return f"{self.tokens} tokens"

    @property
    def heads(self) -> str:
        """Heads, head_dim and dtype in words."""
        shape = self.shape
        return f"{shape.heads} heads ({shape.kv_heads} KV) x {shape.head_dim}, {shape.dtype}"

    def planned(self) -> dict[str, Any]:
        """What a `treeattn.Decoder` of it is planned with, by name."""
        cache = CacheFormat(positions=self.positions)
        return self.shape.plain | {"scale": self.scale, "rules": self.rules, "cache": cache}

    def partial(self) -> reference.Partial:
        """What the oracle makes of this rank's shard."""
        seen = None
        if self.rules.positional:
            rules = self.rules
            seen = reference.seen(self.positions, self.q_positions, causal=rules.causal, window=rules.window)
        return reference.partial(self.q, self.k, self.v, scale=self.scale, lengths=self.lengths, seen=seen)
