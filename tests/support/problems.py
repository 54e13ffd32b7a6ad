"""Problems of attention: random arrays, the bounds that results are held to, and drawn cases of all rules."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.pages import in_pages
from treeattn import reference
from treeattn.attention.arguments import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import as_runs
from treeattn.shards import LAYOUTS, parse_layout

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)
FLOAT8 = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
DEALT = (*LAYOUTS[:3], "uneven", "random")
#: Of numbers whose sums tie, overflow or vanish; how many of their cases are drawn (`make test-bits`).
KINDS = ("plain", "huge", "tiny", "mixed", "grid", "sink", "equal", "inf", "nan", "far")
BITS_CASES = int(os.environ.get("TREEATTN_BITS_CASES", "0"))


def random_qkv(
    tokens: int,
    *,
    batch: int = 1,
    queries: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    v_dim: int | None = None,
    dtype: Any = np.float32,
    seed: int = 0,
) -> tuple[Any, Any, Any]:
    """q, k and v over all tokens, the same on every rank."""
    rng = np.random.default_rng(seed)
    shapes = (queries, heads, head_dim), (tokens, kv_heads, head_dim), (tokens, kv_heads, v_dim or head_dim)
    q, k, v = (rng.standard_normal((batch, *shape)).astype(dtype) for shape in shapes)
    return q, k, v


def assert_exact(
    got: tuple[Any, Any], q: Any, k: Any, v: Any, *, scale: float, rounded: bool = False, **rules: Any
) -> None:
    """Hold (out, lse) to the package's bounds around the float64 oracle on the whole cache.

    rules: as `reference.partial` takes them. rounded: tensor cores hold probabilities in 16 bits.
    """
    assert_near(got, reference.partial(q, k, v, scale=scale, **rules), rounded)


def assert_near(got: tuple[Any, Any], part: reference.Partial, rounded: bool = False) -> None:
    """The same of the oracle's partial of the whole cache."""
    (out, lse), (bound, lse_bound) = reference.combine([part]), reference.error_bounds([part], rounded)
    assert (got[0].shape, got[1].shape) == (out.shape, lse.shape)
    np.testing.assert_allclose(got[0], out, rtol=0, atol=bound)
    np.testing.assert_allclose(got[1], lse, rtol=0, atol=lse_bound)


@dataclass
class Case:
    """One case: the whole arrays, drafts apart, and the rules that `treeattn.decode` takes."""

    q: Any
    k: Any
    v: Any
    drafts: tuple[Any, Any]
    mask: Any
    draft_positions: Any
    q_positions: Any
    rules: dict[str, Any]
    valid: Any
    held: list[tuple[Any, Any]]  # of each rank: where its context stands, and which drafts it has
    hidden: float
    page_size: int  # 0: the cache lies in a row
    begins: Any = None
    scales: tuple[Any, Any] | None = None  # of k and v
    v_dim: int = 0  # above 0: so many first channels of k are the values

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    def in_8_bits(self, seed: int, kind: Any = None) -> Case:
        """The same rules over a cache of 8 bits."""
        rng = np.random.default_rng(seed)
        kind = FLOAT8[rng.integers(2)] if kind is None else kind
        k, v, *drafts = (one.astype(kind) for one in (self.k, self.v, *self.drafts))
        scales = rng.uniform(0.25, 4, (2, k.shape[2])).astype(np.float32)
        return replace(self, k=k, v=v, drafts=tuple(drafts), scales=tuple(scales))

    def latent(self) -> Case:
        """The same rules where the values are the first half of the keys."""
        v_dim = -(-self.k.shape[3] // 16) * 8
        drafts = self.drafts[0], self.drafts[0][..., :v_dim]
        return replace(self, v=self.k[..., :v_dim], drafts=drafts, v_dim=v_dim)

    def wide_latent(self) -> Case:
        """The same rules over one head of latents as wide as those for which there are kernels on a GPU."""

        def widened(one: Any) -> Any:
            return np.take(one, np.arange(576) % one.shape[3], axis=3)

        k, draft_k = (widened(one[:, :, :1]) for one in (self.k, self.drafts[0]))
        values = k[..., :512], draft_k[..., :512]
        return replace(self, q=widened(self.q), k=k, v=values[0], drafts=(draft_k, values[1]), v_dim=512)

    def of_width(self, v_dim: int) -> Case:
        """The same rules over values of a width of their own."""
        taken = np.arange(v_dim) * self.k.shape[3] // v_dim
        v, drafts = (np.take(one, taken, axis=3) for one in (self.v, self.drafts[1]))
        return replace(self, v=v, drafts=(self.drafts[0], drafts))

    def of_numbers(self, rng: np.random.Generator) -> Case:
        """The same rules for queries of float32 over a cache of a drawn kind and type of numbers."""
        kind = str(rng.choice(KINDS))
        q = self.q.astype(np.float32) * np.float32(2.0 ** rng.integers(-6, 7))
        dtype = (*DTYPES[:3], *FLOAT8)[rng.choice(5, p=[0.4, 0.1, 0.3, 0.1, 0.1])]
        with np.errstate(all="ignore"):
            (k, v), drafts = (
                [one.astype(dtype) for one in _numbers(rng, kind, shape)]
                for shape in (self.k.shape, self.drafts[0].shape)
            )
        case = replace(self, q=q, k=k, v=v, drafts=tuple(drafts))
        return case.in_8_bits(0, dtype) if k.dtype.itemsize == 1 else case

    def without_drafts(self) -> Case:
        """Of the context alone."""
        none = {"drafts": tuple(one[:, :0] for one in self.drafts), "mask": self.mask[..., :0]}
        held = [(context, own[:0]) for context, own in self.held]
        return replace(self, **none, draft_positions=self.draft_positions[:, :0], held=held)

    def dealt(self, rng: np.random.Generator, layout: str, size: int, block: int = 1) -> Case:
        """Over other ranks; where nobody asks for positions, tokens may lie in any order."""
        tokens, drafts = self.k.shape[1], self.mask.shape[2]
        held = deal(rng, layout, tokens, drafts, size, block)
        bare = not (self.rules or drafts or block > 1 or self.begins is not None)
        if layout == "random" and bare and (np.asarray(self.valid) == tokens).all():
            held = [(rng.permutation(context), own) for context, own in held]
        return replace(self, held=held)

    def tables(self, given: dict[str, Any]) -> MaskTables | None:
        """What a kernel knows of a shard's mask, without sinks; None where positions are not known."""
        if "positions" not in given:
            return None
        tables = MaskTables(replace(Rules(**self.rules), sink_logits=None), *self.q.shape[:2])
        tokens = given["k"].shape[1] * (given["block_table"].shape[1] if self.page_size else 1)
        tables.update(
            *(as_runs(given["positions"]), tokens, given["lengths"], given["q_positions"]),
            *(given.get(name) for name in ("mask", "draft_positions", "begins")),
        )
        return tables

    def part(self, queries: int, share: float) -> Case:
        """The first queries, over a share of each sequence."""
        stands, valid = self.q_positions[..., :queries], (np.asarray(self.valid) * share).astype(int)
        part = {
            "q": self.q[:, :queries],
            "mask": self.mask[:, :queries],
            "q_positions": stands,
            "valid": valid,
        }
        return replace(self, **part)

    def shard(self, rank: int) -> dict[str, Any]:
        """The arguments of `rank`. What lies beyond its lengths is NaN."""
        context, own = self.held[rank]
        k, v = self.k[:, context], self.v[:, context]
        lengths = np.array([(context < valid).sum() for valid in self.valid])
        given: dict[str, Any] = dict(self.rules)
        if len(context) < 2 or (np.diff(context) > 0).all():
            given |= {"positions": context, "q_positions": self.q_positions}
        given |= {} if self.begins is None else {"begins": self.begins}
        if n := len(own):
            drafts = [one[:, own] for one in self.drafts]
            k, v = (
                np.concatenate([whole, np.zeros_like(part)], 1)
                for whole, part in zip((k, v), drafts, strict=True)
            )
            for b, length in enumerate(lengths):
                for whole, part in zip((k, v), drafts, strict=True):
                    whole[b, length : length + n] = part[b]
            lengths = lengths + n
            given |= {"mask": self.mask[:, :, own], "draft_positions": self.draft_positions[:, own]}
        for b, length in enumerate(lengths):
            k[b, length:], v[b, length:] = self.hidden, self.hidden
        given |= {"q": self.q, "k": k, "v": v, "lengths": lengths, "scale": self.scale}
        if self.page_size:
            pages = [in_pages(one, self.page_size, lengths, self.hidden) for one in (k, v)]
            given |= {"k": pages[0][0], "v": pages[1][0], "block_table": pages[0][1]}
        if self.scales is not None:
            given |= {"k_scale": self.scales[0], "v_scale": self.scales[1]}
        return given | ({"v": None, "v_dim": self.v_dim} if self.v_dim else {})

    def expected(self) -> tuple[Any, Any, float, float]:
        """out and lse of the float64 oracle with the whole mask, and the bounds of their errors."""
        positions, rules = np.arange(self.k.shape[1]), dict(self.rules)
        t = np.broadcast_to(self.q_positions, self.q.shape[:2])
        kept = {name: rules[name] for name in ("causal", "window", "leading") if name in rules}
        seen = reference.seen(positions, t, begins=0 if self.begins is None else self.begins, **kept)
        seen = seen & (positions[None, None] < np.asarray(self.valid)[:, None, None])
        seen = np.concatenate([seen, self.mask], 2)
        stands = np.concatenate(
            [np.broadcast_to(positions, (len(t), len(positions))), self.draft_positions], 1
        )
        k, v = (np.concatenate(pair, 1) for pair in zip((self.k, self.v), self.drafts, strict=True))
        if self.scales is not None:
            k, v = (a.astype(float) * one[:, None] for a, one in zip((k, v), self.scales, strict=True))
        part = reference.partial(
            *(self.q, k, v),
            scale=self.scale,
            seen=seen,
            softcap=rules.get("softcap"),
            alibi=rules.get("alibi"),
            distance=t[:, :, None] - stands[:, None],
        )
        parts = [part]
        if "sink_logits" in rules:
            parts.append(reference.sink(part, rules["sink_logits"]))
        return *reference.combine(parts), *reference.error_bounds([part])


def draw(seed: int, size: int, most: int = 2100) -> Case:
    """The same case on every rank, of at most so many tokens."""
    rng = np.random.default_rng(seed)
    batch, queries = int(rng.integers(1, 4)), int(rng.choice([1, 1, 2, 3, 5, 9, 17]))
    kv_heads, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 4, 5]))
    heads, head_dim = kv_heads * group, int(rng.choice([8, 64, 72, 128]))
    tokens = int(rng.choice([n for n in (0, 1, 7, 32, 40, 130, 700, 2100) if n <= most]))
    dtype = DTYPES[rng.choice(len(DTYPES), p=[0.4, 0.2, 0.3, 0.1])]
    n = int(rng.choice([0, 0, 1, 3, 33]))

    def values(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(dtype)

    q = values(batch, queries, heads, head_dim) * dtype(rng.choice([1, 4]))
    k, v = values(batch, tokens, kv_heads, head_dim), values(batch, tokens, kv_heads, head_dim)
    q_positions = rng.integers(0, tokens + 20, (queries,) if rng.random() < 0.3 else (batch, queries))
    return Case(
        *(q, k, v),
        drafts=(values(batch, n, kv_heads, head_dim), values(batch, n, kv_heads, head_dim)),
        mask=rng.random((batch, queries, n)) < 0.5,
        draft_positions=rng.integers(0, tokens + 20, (batch, n)),
        q_positions=q_positions,
        rules=_rules(rng, heads, tokens),
        valid=rng.integers(0, tokens + 1, batch) if rng.random() < 0.5 else np.full(batch, tokens),
        held=deal(rng, str(rng.choice(DEALT)), tokens, n, size),
        hidden=float(rng.choice([np.nan, np.inf, 0])),
        page_size=int(rng.choice([0, 0, 0, 1, 7, 16, 64])),
        begins=rng.integers(0, tokens + 3, batch) if rng.random() < 0.3 else None,
    )


def _rules(rng: np.random.Generator, heads: int, tokens: int) -> dict[str, Any]:
    """Any of them, in all pairs over many seeds."""
    side = lambda: None if rng.random() < 0.3 else int(rng.integers(0, tokens // 2 + 2))  # noqa: E731
    drawn = {
        "causal": True,
        "window": (side(), side()),
        "leading": int(rng.integers(0, 9)),
        "softcap": float(rng.choice([1.0, 20.0])),
        "alibi": rng.uniform(-0.5, 0.5, heads),
        "sink_logits": np.where(rng.random(heads) < 0.2, -np.inf, rng.uniform(-2, 4, heads)),
    }
    return {name: value for name, value in drawn.items() if rng.random() < 0.45}


def _numbers(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> tuple[Any, Any]:
    k, v = (rng.standard_normal(shape, np.float32) for _ in "kv")
    if kind in ("huge", "tiny"):
        v *= np.float32(2.0 ** {"huge": 120, "tiny": -145}[kind])
    elif kind == "mixed":
        v = np.ldexp(v, rng.integers(-60, 60, v.shape)).astype(np.float32)
    elif kind == "grid":  # products that tie
        v = np.ldexp(np.float32(1), rng.integers(-50, 40, v.shape)).astype(np.float32)
        k = np.round(k * 2) / 2
    elif kind == "far":
        k *= np.float32(2.0**20)
    elif kind == "equal":
        k[:] = k[:, :1]
    elif kind != "plain" and shape[1]:
        at = rng.integers(shape[1])
        if kind == "sink":
            k[:, at] *= 30
        else:
            (k, v)[int(rng.integers(2))][:, at] = np.float32(kind)
    return k, v


def deal(
    rng: np.random.Generator, layout: str, tokens: int, drafts: int, size: int, block: int = 1
) -> list[tuple[Any, Any]]:
    """`Case.held` of so many ranks: by a layout, uneven, or any tokens; block: so many that stay together."""
    if block > 1:
        owner = rng.integers(0, size, -(-tokens // block))[np.arange(tokens) // block]
        own = [np.flatnonzero(owner == rank) for rank in range(size)]
    elif layout == "random":
        owner = rng.integers(0, size, tokens) if rng.random() < 0.7 else np.full(tokens, rng.integers(size))
        own = [np.flatnonzero(owner == rank) for rank in range(size)]
    elif layout == "uneven":
        own = np.split(np.arange(tokens), np.sort(rng.integers(0, tokens + 1, size - 1)))
    else:
        runs = [parse_layout(layout).runs(tokens, rank, size) for rank in range(size)]
        own = [np.concatenate([np.arange(tokens)[run] for run in ranks]) for ranks in runs]
    holder = rng.integers(0, size, drafts)
    return [(context, np.flatnonzero(holder == rank)) for rank, context in enumerate(own)]
