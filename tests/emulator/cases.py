"""THE table of attention cases, which the CPU backend, the emulator and a GPU all have to pass.

`Case.inputs()` makes NumPy arrays, `Case.expected()` asks the float64 oracle, `Case.check()` holds
results to what the package promises.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from treeattn import reference

__all__ = ["CASES", "Case", "Inputs", "is_tensor_core_case"]

Array = np.ndarray[Any, Any]
_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class Inputs(NamedTuple):
    """q [batch, queries, heads, head_dim]; k, v [batch, tokens, kv_heads, head_dim]; lengths [batch]
    int64 or None; mask [batch, queries, words] uint64 or None."""

    q: Array
    k: Array
    v: Array
    lengths: Array | None
    mask: Array | None


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of work. group: query heads of a KV head. splits None: chosen by the backend.

    layout: "tokens" [batch, tokens, kv_heads, head_dim]; "heads" the same from memory that is
    [batch, kv_heads, tokens, head_dim]; "gaps" with other data between rows.
    scores: their largest size, about. mask_tokens: draft tokens at the end, under a random tree.
    """

    dtype: str
    head_dim: int
    group: int = 1
    kv_heads: int = 2
    queries: int = 1
    tokens: int = 150
    batch: int = 1
    lengths: tuple[int, ...] | None = None
    splits: int | None = None
    layout: str = "tokens"
    scores: float = 4.0
    mask_tokens: int = 0
    tensor_cores: bool = True

    def __str__(self) -> str:
        parts = [self.dtype, f"d{self.head_dim}", f"g{self.group}", f"q{self.queries}", f"t{self.tokens}"]
        parts += [f"len{'+'.join(map(str, self.lengths))}"] if self.lengths else []
        parts += [f"splits{self.splits}"] if self.splits else []
        parts += [self.layout] if self.layout != "tokens" else []
        parts += [f"scores{self.scores:g}"] if self.scores != 4 else []
        parts += [f"mask{self.mask_tokens}"] if self.mask_tokens else []
        parts += [] if self.tensor_cores else ["fma"]
        return "-".join(parts)

    @property
    def scale(self) -> float:
        """1 / sqrt(head_dim)"""
        return float(self.head_dim**-0.5)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    def valid(self, b: int) -> int:
        """Valid tokens of a batch row."""
        return self.tokens if self.lengths is None else self.lengths[b]

    def inputs(self) -> Inputs:
        """The arrays, always the same. What lies beyond the lengths is NaN: it must not be read."""
        rng = np.random.default_rng(20)
        dtype = _DTYPES[self.dtype]
        shape = (self.batch, self.tokens, self.kv_heads, self.head_dim)
        q = rng.standard_normal((self.batch, self.queries, self.heads, self.head_dim)) * self.scores / 4
        k, v = (self._lay_out(rng.standard_normal(shape).astype(dtype)) for _ in "kv")
        for b in range(self.batch):
            k[b, self.valid(b) :], v[b, self.valid(b) :] = np.nan, np.nan
        lengths = None if self.lengths is None else np.array(self.lengths, np.int64)
        return Inputs(q.astype(dtype), k, v, lengths, self._mask(rng))

    def _lay_out(self, array: Array) -> Array:
        if self.layout == "heads":
            return np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)
        if self.layout == "gaps":
            batch, tokens, heads, head_dim = array.shape
            room = np.full((batch, tokens + 3, heads + 1, head_dim + 16), np.nan, array.dtype)
            view = room[:, 1 : tokens + 1, :heads, :head_dim]
            view[...] = array
            return view
        return array

    def _mask(self, rng: np.random.Generator) -> Array | None:
        """Query i is draft token i * mask_tokens // queries and sees its ancestors in a random tree."""
        if not self.mask_tokens:
            return None
        words = (self.mask_tokens + 63) // 64
        mask = np.zeros((self.batch, self.queries, words), np.uint64)
        for b in range(self.batch):
            parents = [-1] + [int(rng.integers(0, i)) for i in range(1, self.mask_tokens)]
            for i in range(self.queries):
                node = i * self.mask_tokens // self.queries
                while node >= 0:
                    mask[b, i, node // 64] |= np.uint64(1 << node % 64)
                    node = parents[node]
        return mask

    def check(self, out: Array, lse: Array, tensor_cores: bool) -> None:
        """Hold out [batch, queries, heads, head_dim], lse [batch, heads, queries] to the promised bounds."""
        want = _expected(self)
        bound, lse_bound = want.bounds
        assert out.shape == want.out.shape
        assert lse.shape == want.lse.shape
        if tensor_cores:
            bound = max(bound, 4e-3 * want.largest_value)
        assert np.abs(out - want.out).max(initial=0) <= bound
        empty = want.lse == -np.inf
        assert ((lse == -np.inf) == empty).all()
        assert np.abs(lse[~empty] - want.lse[~empty]).max(initial=0) <= lse_bound


class _Expected(NamedTuple):
    out: Array
    lse: Array
    bounds: tuple[float, float]
    largest_value: float


@functools.cache
def _expected(case: Case) -> _Expected:
    """The oracle's answer, query by query: each over the tokens that it may see."""
    q, k, v, _, mask = case.inputs()
    out = np.empty(q.shape)
    lse = np.empty((case.batch, case.heads, case.queries))
    seen = []
    for b in range(case.batch):
        for i in range(case.queries):
            tokens = _visible(case, mask, b, i)
            part = reference.partial(
                q[b : b + 1, i : i + 1], k[b : b + 1, tokens], v[b : b + 1, tokens], scale=case.scale
            )
            row_out, row_lse = reference.combine([part])
            out[b, i], lse[b, :, i] = row_out[0, 0], row_lse[0, :, 0]
            seen.append(part)
    return _Expected(out, lse, reference.error_bounds(seen), max(p.largest_value for p in seen))


def _visible(case: Case, mask: Array | None, b: int, query: int) -> Array:
    tokens = np.arange(case.valid(b))
    if mask is None:
        return tokens
    bit = tokens - (case.valid(b) - case.mask_tokens)
    words = mask[b, query, np.maximum(bit, 0) // 64]
    return tokens[(bit < 0) | ((words >> (np.maximum(bit, 0) % 64).astype(np.uint64)) & np.uint64(1) != 0)]


def is_tensor_core_case(case: Case) -> bool:
    """Whether a GPU backend takes the tensor-core kernel for it."""
    return case.tensor_cores and case.dtype != "float32" and case.group * case.queries >= 4


CASES = (
    # Every type and head dimension, one query head for each KV head.
    *(Case(dtype, d, splits=3) for dtype in _DTYPES for d in (64, 80, 96, 128, 256)),
    # Grouping and several queries: tensor cores for 16 bits, multiply-add for the rest.
    *(Case(dtype, d, group=4, splits=2) for dtype in ("float16", "bfloat16") for d in (64, 80, 96, 128, 256)),
    Case("float32", 64, group=2, batch=2, splits=4),
    Case("float32", 64, group=3, queries=3, kv_heads=1, splits=2),
    Case("float32", 128, group=8, kv_heads=1, splits=5),
    Case("bfloat16", 64, group=3, queries=7, kv_heads=1, splits=2),
    Case("bfloat16", 64, group=8, kv_heads=1, splits=3, tensor_cores=False),
    Case("float16", 64, group=2, splits=2),
    # Lengths: whole, partial, nothing; fewer tokens than splits; an empty shard; one token.
    Case("float32", 64, batch=4, tokens=70, lengths=(70, 33, 1, 0), splits=3),
    Case("bfloat16", 64, group=4, batch=4, tokens=140, lengths=(140, 65, 1, 0), splits=2),
    Case("float32", 64, tokens=5, splits=16),
    Case("float32", 64, tokens=0),
    Case("bfloat16", 64, group=4, tokens=0, splits=2),
    Case("float32", 64, tokens=1),
    Case("bfloat16", 64, group=4, tokens=1),
    # Splits by the backend's own choice, and many of them.
    Case("float32", 64, tokens=700),
    Case("bfloat16", 64, group=4, tokens=700),
    Case("float32", 64, kv_heads=1, tokens=1100, splits=35),
    # Memory that is laid out otherwise.
    *(Case("float32", 64, layout=layout, splits=2) for layout in ("heads", "gaps")),
    *(Case("bfloat16", 64, group=4, layout=layout, splits=2) for layout in ("heads", "gaps")),
    # Scores of +-1e4.
    Case("float32", 64, scores=1e4, splits=3),
    Case("bfloat16", 64, group=4, scores=1e4, splits=3),
    # Draft trees, also with more than one word of the mask and with the shard shorter than the draft.
    Case("bfloat16", 64, group=2, queries=9, kv_heads=1, tokens=90, mask_tokens=9, splits=2),
    Case("float32", 64, queries=5, kv_heads=1, tokens=90, mask_tokens=70, splits=2),
    Case(
        "bfloat16",
        64,
        queries=8,
        kv_heads=1,
        batch=3,
        tokens=90,
        lengths=(90, 6, 80),
        mask_tokens=70,
        splits=2,
    ),
)
