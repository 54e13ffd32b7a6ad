"""A decode problem that lies in a file: its shards, in rows or pages, and the judge of its results."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from treeattn import files, reference
from treeattn.agreement import collectively, must_match
from treeattn.attention.mask import Rules
from treeattn.attention.pages import CheckedTable, as_table, rows_of
from treeattn.attention.shape import CACHE_DTYPES, Shape, dtype_name, values_of
from treeattn.attention.shard import CacheFormat, Shard
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.decoder import Decoder
from treeattn.errors import ArgumentError
from treeattn.partial import Array
from treeattn.report import Progress, Report
from treeattn.shards import Layout


class Problem:
    """The input: q whole, k and v as this rank's shard. Raises the same `ArgumentError` on every rank."""

    def __init__(
        self,
        world: MpiCommunicator,
        source: Path,
        layout: Layout,
        expect: Path | None,
        rules: Rules | None = None,
    ) -> None:
        self.source, self.layout, self.rules = source, layout, rules or Rules()
        collectively(world, lambda: self._open(world, expect))
        must_match(world, {"the input file": self.identity})
        self._load(world)

    def _open(self, world: MpiCommunicator, expect: Path | None) -> None:
        self.file = files.open_cache(self.source)
        stated, v_dim = self.file.scale(), self.file.v_dim()
        q, k = self._four_axes("q"), self._four_axes("k")
        v = self._four_axes("v") if v_dim is None else values_of(k, None, v_dim, stated)
        table = self.file.tensors.get("block_table")
        page_size = None if table is None else k.shape[1]
        scales = (self.file.tensors.get(name) for name in ("k_scale", "v_scale"))
        stored, (k_scale, v_scale) = dtype_name(k, served=CACHE_DTYPES), scales
        cache = stored, k_scale, v_scale, v.shape[3], page_size
        batch, queries, heads, head_dim = q.shape
        self.shape = Shape(batch, queries, heads, k.shape[2], head_dim, dtype_name(q), *cache)
        self.shape.check_query(q)
        self.shape.check_cache(k, v)
        self.scale = self.shape.default_scale() if stated is None else stated
        self._take_tokens(world, table)
        self._take_rules(world)
        self.expected = None
        if expect is not None:
            wanted = files.open_cache(expect)
            self.expected = (np.array(wanted["out"]), np.array(wanted["lse"]))
            if (
                self.expected[0].shape != (*q.shape[:3], v.shape[3])
                or self.expected[1].shape != self.shape.lse_shape
            ):
                raise ArgumentError(f"{expect}: out and lse do not have the shapes that {self.source} gives")
        self.identity = (self.shape, self.tokens, self.scale, self.source.stat().st_size)

    def _four_axes(self, name: str) -> Array:
        tensor = self.file[name]
        if tensor.ndim != 4:
            raise ArgumentError(f"{self.source}: {name} has shape {list(tensor.shape)}, expected four axes")
        return tensor

    def _take_tokens(self, world: MpiCommunicator, table: Array | None) -> None:
        """How many tokens a sequence can have, and which are this rank's."""
        pages, page_size = self.file["k"].shape[:2]
        self.paged: PagedShard | None = None
        self.lengths: Array | None = None
        table = None if table is None else as_table(table, self.shape.batch)
        self.tokens = page_size if table is None else page_size * table.shape[1]
        given = self.file["lengths"] if table is not None or "lengths" in self.file.tensors else None
        lengths = None if given is None else self.shape.check_lengths(given, self.tokens)
        if table is not None:
            self.paged = PagedShard(table, (pages, page_size), lengths, self.layout, world.rank, world.size)
            self.lengths, self.own = self.paged.lengths, self.paged.tokens
            return
        self.runs = self.layout.runs(self.tokens, world.rank, world.size)
        every = np.arange(self.tokens)
        self.own = np.concatenate([every[:0], *(every[run] for run in self.runs)])
        if lengths is not None:
            self.lengths = self.layout.shard_lengths(lengths, self.tokens, world.rank, world.size)

    def _take_rules(self, world: MpiCommunicator) -> None:
        """Where tokens of this rank and queries stand, and what the rules have for each head."""
        tensors = self.file.tensors
        self.rules = replace(self.rules, alibi=tensors.get("alibi"), sink_logits=tensors.get("sink_logits"))
        self.rules.check_heads(self.shape.heads)  # the oracle takes what fits by broadcasting
        positions = np.arange(self.tokens)
        if "positions" in tensors:
            positions = np.asarray(tensors["positions"])
            if positions.shape != (self.tokens,) or positions.dtype.kind not in "iu":
                raise ArgumentError(
                    f"{self.source}: positions must be whole numbers [tokens] = [{self.tokens}]"
                )
        self.positions = positions[self.own]
        self.q_positions = tensors.get("q_positions")
        if self.q_positions is None:
            ends = np.full(self.shape.batch, self.tokens)
            if "lengths" in tensors:
                ends = np.asarray(tensors["lengths"])
            last = np.where(ends > 0, positions[np.maximum(ends, 1) - 1] if self.tokens else 0, 0)
            stands = last[:, None] + 1 - self.shape.queries + np.arange(self.shape.queries)
            self.q_positions = np.maximum(stands, 0)

    def step(self, inputs: tuple[Array | None, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a step of `treeattn.Decoder`, from q, k, v and lengths on its device."""
        q, k, v, lengths = inputs
        seen = {"q_positions": self.q_positions} if self.rules.positional else {}
        if self.paged is not None:
            shard = Shard(cast(Array, k), v, lengths, block_table=self.paged.block_table)
            return (q, shard), seen
        return inputs, seen

    def planned(self) -> dict[str, Any]:
        shape = self.shape
        held = CacheFormat(
            dtype=shape.kv_dtype,
            v_dim=shape.v_dim if self.latent or shape.v_dim != shape.head_dim else None,
            page_size=shape.page_size,
            k_scale=shape.k_scale,
            v_scale=shape.v_scale,
            positions=self.positions if self.rules.positional else None,
        )
        return shape.plain | {"scale": self.scale, "rules": self.rules, "cache": held}

    @property
    def latent(self) -> bool:
        """Whether the values are channels of the keys."""
        return "v" not in self.file.tensors

    def meant(self) -> tuple[Array, Array]:
        """k and v of this rank, [batch, tokens, kv_heads, head_dim and v_dim], as what they stand for: those
        of 8 bits times their scales, float64."""
        k, v = self.k, self.k[..., : self.shape.v_dim] if self.latent else self.v
        if self.paged is not None:
            k, v = self.paged.rows(k), self.paged.rows(v)
        if self.shape.k_scale is None:
            return k, v
        scales = (np.array(scale)[:, None] for scale in (self.shape.k_scale, self.shape.v_scale))
        k, v = (array.astype(np.float64) * scale for array, scale in zip((k, v), scales, strict=True))
        return k, v

    def _load(self, world: MpiCommunicator) -> None:
        self.q = np.array(self.file["q"])
        names = "k" if self.latent else "kv"
        if self.paged is not None:
            paged = {name: self.file[name][self.paged.numbers] for name in names}
            self.k: Array = paged["k"]
            self.v: Any = paged.get("v")
            return
        size = sum(self.file[name].nbytes for name in names)
        nbytes = size * sum(len(range(*r.indices(self.tokens))) for r in self.runs)
        say, total, done = Progress(world.rank == 0), nbytes // max(self.tokens, 1), 0

        def told(size: int) -> None:
            nonlocal done
            done += size
            say(f"reading the shard of rank 0: {done / total:.0%} of {total:,} bytes")

        loaded = {name: files.load_runs(self.file[name], self.runs, told) for name in names}
        self.k, self.v = loaded["k"], loaded.get("v")


class Judge:
    """Says how far a result is from the oracle and from the expected tensors."""

    def __init__(self, world: MpiCommunicator, problem: Problem, check: bool, rounded: bool = False) -> None:
        """rounded: as for `reference.error_bounds`."""
        self.world = world
        self.against: dict[str, tuple[Array, Array]] = {}
        self.bringing_nan: list[int] = []
        self.bounds: tuple[float, float] | None = None
        if check or problem.expected is not None:
            if check:
                must_match(world, {"q": hashlib.sha256(problem.q.tobytes()).hexdigest()})
            mine = _oracle(
                *(problem.rules, problem.q, *problem.meant()),
                scale=problem.scale,
                lengths=problem.lengths,
                positions=problem.positions,
                q_positions=problem.q_positions,
            )
            partials = world.gather(mine, root=0)
            if partials is not None:
                self.bounds = reference.error_bounds(partials, rounded)
                self.bringing_nan = [rank for rank, part in enumerate(partials) if _has_nan(part)]
                if problem.rules.sink_logits is not None:
                    partials.append(reference.sink(mine, problem.rules.sink_logits))
                if check:
                    self.against["oracle"] = reference.combine(partials)
                if problem.expected is not None:
                    self.against["expected"] = problem.expected

    def errors(self, out: Array, lse: Array) -> dict[str, tuple[float, float]]:
        """Largest |out - reference| and |lse - reference| for each reference, on rank 0."""
        return {
            name: (largest_difference(out, wanted[0]), largest_difference(lse, wanted[1]))
            for name, wanted in self.against.items()
        }

    def nan(self, out: Array, lse: Array) -> dict[str, Any]:
        """How many results (rows of out, with their lse) are NaN, and in each reference; the ranks whose
        tokens bring NaN into the oracle. On rank 0."""
        mine = _nan_rows(out, lse)
        wanted = {name: _nan_rows(*reference) for name, reference in self.against.items()}
        return {
            "results": int(mine.sum()),
            "of": mine.size,
            "references": {name: int(rows.sum()) for name, rows in wanted.items()},
            "same_rows": all(np.array_equal(mine, rows) for rows in wanted.values()),
            "ranks": self.bringing_nan,
        }

    def passes(self, errors: dict[str, tuple[float, float]]) -> bool:
        bounds = self.bounds
        return bounds is None or all(o <= bounds[0] and s <= bounds[1] for o, s in errors.values())


def _oracle(
    rules: Rules, q: Any, k: Any, v: Any, *, scale: float, lengths: Any, positions: Any, q_positions: Any
) -> reference.Partial:
    """The oracle's partial of one shard, whose tokens stand at `positions` [tokens], for queries at
    `q_positions` [batch, queries]."""
    plain = {"scale": scale, "lengths": lengths, "softcap": rules.softcap}
    if not rules.positional:
        return reference.partial(q, k, v, **plain)
    stands = np.broadcast_to(q_positions, q.shape[:2])
    return reference.partial(
        *(q, k, v),
        **plain,
        seen=reference.seen(
            positions, stands, causal=rules.causal, window=rules.window, leading=rules.leading
        ),
        alibi=None if rules.alibi is None else np.asarray(rules.alibi),
        distance=stands[:, :, None] - np.asarray(positions)[None, None],
    )


def _nan_rows(out: Array, lse: Array) -> Array:
    """Which results [batch, heads, queries] are NaN, in part or whole."""
    return np.asarray(np.isnan(out).any(axis=-1, keepdims=False)).transpose(0, 2, 1) | np.isnan(lse)


def _has_nan(part: reference.Partial) -> bool:
    return any(bool(np.isnan(array).any()) for array in (part.max, part.denominator, part.numerator))


def largest_difference(mine: Array, wanted: Array) -> float:
    """max |mine - wanted|, as `reference.difference` has it."""
    return float(reference.difference(mine, wanted).max(initial=0.0))


def digest(out: Array, lse: Array) -> str:
    """SHA-256 of a result."""
    return hashlib.sha256(out.tobytes() + lse.tobytes()).hexdigest()


def ended_with(
    world: MpiCommunicator, decoder: Decoder, out: Array, lse: Array, reproducible: str | None
) -> dict[str, Any]:
    """Who made a result, its digests, and how it is known that all ranks have the same bits. Collective."""
    proof, mine = decoder.certificate, digest(out, lse)
    determinism = "measured" if proof is None else proof.determinism
    return {
        "scheme": decoder.scheme,
        "executor": decoder.executor,
        "same_bits": len(set(world.allgather(mine))) == 1,
        "determinism": "tokens" if reproducible else determinism,
        "reproducible": reproducible,
        "sha256": mine,
    }


def heads_of(shape: Shape) -> str:
    return f"{shape.heads} heads ({shape.kv_heads} KV) x {shape.head_dim}"


class PagedShard:
    """Of a block table [batch, pages of a sequence] a rank's part: a layout deals out places of pages.

    numbers: of its pages in the file. block_table, lengths: as `treeattn.Decoder` takes them. tokens: their
    numbers in a sequence.
    """

    def __init__(
        self, table: Array, pages: tuple[int, int], lengths: Any, layout: Layout, rank: int, size: int
    ) -> None:
        """table: as `as_table` gives it. pages: how many the file has, and tokens of each. Raises
        `ArgumentError`."""
        page_size = pages[1]
        CheckedTable().check(table, pages, lengths, None)
        every = np.arange(table.shape[1])
        places = np.concatenate([every[:0], *(every[run] for run in layout.runs(len(every), rank, size))])
        valid = np.clip(np.asarray(lengths)[:, None] - places * page_size, 0, page_size)
        own = table[:, places]
        self.lengths = valid.sum(axis=1)
        self.numbers = np.unique(own[valid > 0])
        self.block_table = np.where(valid > 0, np.searchsorted(self.numbers, own), -1).astype(np.int32)
        self.tokens = (places[:, None] * page_size + np.arange(page_size)).ravel()

    def rows(self, cache: Array) -> Any:
        """[batch, tokens, ..] of this rank's pages; beyond `lengths` anything."""
        tokens = np.arange(len(self.tokens))
        if not len(cache):
            return np.zeros((len(self.lengths), len(tokens), *cache.shape[2:]), cache.dtype)
        return np.stack([rows_of(cache, np.maximum(row, 0), tokens) for row in self.block_table])


def show_digests(made: Report, rows: list[dict[str, Any]]) -> None:
    """A line for each result that the rows have: one, where bits are of the tokens alone."""
    for digest in sorted({row["sha256"] for row in rows}):
        made.text(f"SHA-256 of out and lse, on any ranks and machine: {digest}")
