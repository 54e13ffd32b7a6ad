"""Attention cases, which the CPU backend, the emulator and a GPU all have to pass: a table, and drawn ones.

`Case.inputs()` makes NumPy arrays; `Case.check()` asks the float64 oracle and holds results to what the
package promises.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 - types that NumPy finds by name
import numpy as np

from tests.support.problems import assert_near
from treeattn import reference
from treeattn.attention.arguments import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs
from treeattn.backends.cuda.variants import HEAD_DIMS

Array = np.ndarray[Any, Any]
_TYPES_8 = ("float8_e4m3fn", "float8_e5m2")


class Inputs(NamedTuple):
    """q [batch, queries, heads, head_dim]; k, v [batch, tokens, kv_heads, head_dim]; lengths [batch]
    int64 or None; what queries see, or None where that is all."""

    q: Array
    k: Array
    v: Array
    lengths: Array | None
    visible: MaskTables | None


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of work. group: query heads of a KV head. splits None: chosen by the backend.

    layout: "tokens" [batch, tokens, kv_heads, head_dim]; "heads" the same from memory that is
    [batch, kv_heads, tokens, head_dim]; "gaps" with other data between rows.
    scores: their largest size, about. drafts: tokens at the end, under a random tree.
    causal .. alibi: as `treeattn.decode` takes them; runs: where tokens stand, (start, step, count);
    q_at: where queries stand in each sequence, None: anywhere. v_dim: of latent attention, values are the
    first channels of the keys. kv: type of the cache, of 8 bits with scales; None: that of q.
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
    drafts: int = 0
    tensor_cores: bool = True
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    leading: int = 0
    softcap: float | None = None
    alibi: bool = False
    runs: tuple[tuple[int, int, int], ...] | None = None
    q_at: tuple[int, ...] | None = None
    begins: tuple[int, ...] | None = None
    v_dim: int | None = None
    kv: str | None = None

    @classmethod
    def draw(cls, seed: int, head_dims: tuple[int, ...], dtypes: tuple[str, ...]) -> Case:
        """Any shape and any rules together, always the same of a seed."""
        rng = np.random.default_rng(seed)

        def some(probability: float, value: Any) -> Any:
            return value if rng.random() < probability else None

        latent = rng.random() < 0.15
        tokens, batch = int(rng.choice([1, 7, 40, 130, 300, 700])), int(rng.integers(1, 4))
        drafts = min(int(rng.choice([0, 0, 0, 1, 33])), tokens)
        cut = int(rng.integers(1, tokens + 1))
        side = (some(0.7, int(rng.integers(tokens))), some(0.7, int(rng.integers(tokens))))
        return cls(
            dtype="float16" if latent and "float64" not in dtypes else str(rng.choice(dtypes)),
            head_dim=576 if latent else int(rng.choice(head_dims)),
            v_dim=512 if latent else None,
            kv=some(0.3, str(rng.choice(_TYPES_8))),
            group=int(rng.choice([1, 2, 3, 4, 8])),
            kv_heads=1 if latent else int(rng.integers(1, 4)),
            queries=int(rng.choice([1, 1, 2, 3, 9, 17])),
            tokens=tokens,
            batch=batch,
            lengths=some(0.5, tuple(rng.integers(drafts, tokens + 1, batch).tolist())),
            splits=int(rng.integers(1, 6)),
            layout=str(rng.choice(["tokens", "heads", "gaps"])),
            drafts=drafts,
            causal=rng.random() < 0.4,
            window=some(0.4, side),
            leading=int(rng.choice([0, 0, 5])),
            softcap=some(0.3, float(rng.choice([1.0, 20.0]))),
            alibi=rng.random() < 0.3,
            runs=some(0.5, ((3, 2, cut), (3 + 2 * cut, 1, tokens - cut))),
            begins=some(0.3, tuple(rng.integers(0, tokens + 3, batch).tolist())),
        )

    def __str__(self) -> str:
        """What it is named in a report: all that is not as usual."""
        given = ((field, getattr(self, field.name)) for field in fields(self))
        return "-".join(f"{field.name}{value}" for field, value in given if value != field.default)

    @property
    def scale(self) -> float:
        """1 / sqrt(head_dim)"""
        return float(self.head_dim**-0.5)

    @property
    def width(self) -> int:
        """Channels of a value."""
        return self.v_dim or self.head_dim

    @property
    def scales(self) -> dict[str, Array]:
        """Of each KV head, what elements of a cache of 8 bits are multiplied with."""
        numbers = np.linspace(0.5, 3.0, self.kv_heads, dtype=np.float32)
        values = numbers if self.v_dim else numbers[::-1] / 2
        return {"k_scale": numbers, "v_scale": values} if self.kv else {}

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def plan(self) -> dict[str, Any]:
        """Of a `treeattn.Decoder` on a GPU."""
        shape = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return shape | {"batch": self.batch, "queries": self.queries, "dtype": self.dtype, "device": "cuda"}

    def valid(self, b: int) -> int:
        """Valid tokens of a batch row."""
        return self.tokens if self.lengths is None else self.lengths[b]

    @property
    def limited(self) -> bool:
        """Whether queries see some tokens only, or not all alike."""
        return bool(self.drafts or self.causal or self.window or self.softcap or self.alibi or self.begins)

    def inputs(self) -> Inputs:
        """The arrays, always the same. What nobody may see is NaN: it must not be read."""
        rng = np.random.default_rng(20)
        dtype = np.dtype(self.dtype)
        kind = np.dtype(self.kv or dtype)
        shape = (self.batch, self.tokens, self.kv_heads, self.head_dim)
        q = rng.standard_normal((self.batch, self.queries, self.heads, self.head_dim)) * self.scores / 4
        k, v = (self._lay_out(rng.standard_normal(shape).astype(kind)) for _ in "kv")
        hidden = ~self.seen().any(axis=1)
        k[hidden], v[hidden] = np.nan, np.nan
        v = k[..., : self.v_dim] if self.v_dim else v
        lengths = None if self.lengths is None else np.array(self.lengths, np.int64)
        return Inputs(q.astype(dtype), k, v, lengths, self.visible())

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

    def visible(self) -> MaskTables | None:
        """The tables of the backends; None where all valid tokens are seen."""
        if not self.limited:
            return None
        rules = Rules(**self._sight, softcap=self.softcap, alibi=self.slopes)
        visible = MaskTables(rules, self.batch, self.queries)
        drafts = dict(zip(("mask", "draft_positions"), self._drafts() if self.drafts else (), strict=False))
        given = Runs(self._runs), self.tokens, self.lengths, self.q_positions
        visible.update(*given, **drafts, begins=self.begins)
        return visible

    @property
    def _sight(self) -> dict[str, Any]:
        return {"causal": self.causal, "window": self.window, "leading": self.leading}

    def seen(self) -> Array:
        """Who sees whom, token by token: [batch, queries, tokens]."""
        seen = reference.seen(self._positions(), self.q_positions, begins=self.begins or 0, **self._sight)
        tree, _ = self._drafts()
        for b in range(self.batch):
            seen[b, :, self.valid(b) - self.drafts :] = False
            seen[b, :, self.valid(b) - self.drafts : self.valid(b)] = tree[b]
        return np.asarray(seen)

    def distance(self) -> Array:
        """From each query to each token: [batch, queries, tokens]."""
        stands = np.repeat(self._positions()[None], self.batch, axis=0)
        _, drafts = self._drafts()
        for b in range(self.batch):
            stands[b, self.valid(b) - self.drafts : self.valid(b)] = drafts[b]
        return np.asarray(self.q_positions[:, :, None] - stands[:, None])

    @property
    def slopes(self) -> Array | None:
        """[heads] of ALiBi, some below 0, or None."""
        return np.linspace(-0.02, 0.2, self.heads) if self.alibi else None

    @property
    def q_positions(self) -> Array:
        """[batch, queries]"""
        if self.q_at is not None:
            return np.broadcast_to(np.array(self.q_at), (self.batch, self.queries)).copy()
        rng = np.random.default_rng(self.tokens)
        return rng.integers(0, Runs(self._runs).end + 9, (self.batch, self.queries))

    @property
    def _runs(self) -> tuple[tuple[int, int, int], ...]:
        return ((0, 1, self.tokens),) if self.runs is None else self.runs

    def _positions(self) -> Array:
        return np.asarray(Runs(self._runs).positions(0, self.tokens))

    def _drafts(self) -> tuple[Array, Array]:
        """The mask, bool [batch, queries, drafts], and where drafts stand. Query i is draft token
        i * drafts // queries and sees its ancestors in a random tree."""
        rng = np.random.default_rng(self.drafts)
        mask = np.zeros((self.batch, self.queries, self.drafts), bool)
        stand = rng.integers(0, self.tokens + 9, (self.batch, self.drafts))
        for b in range(self.batch if self.drafts else 0):
            parents = [-1] + [int(rng.integers(0, i)) for i in range(1, self.drafts)]
            for i in range(self.queries):
                node = i * self.drafts // self.queries
                while node >= 0:
                    mask[b, i, node] = True
                    node = parents[node]
        return mask, stand

    def check(self, out: Array, lse: Array, tensor_cores: bool) -> None:
        """Hold out [batch, queries, heads, head_dim], lse [batch, heads, queries] to the promised bounds."""
        assert_near((out, lse), _oracle(self), tensor_cores)


@functools.cache
def _oracle(case: Case) -> reference.Partial:
    """Which looks at every token."""
    q, k, v, _, _ = case.inputs()
    if case.kv:
        k, v = (x.astype(float) * one[:, None] for x, one in zip((k, v), case.scales.values(), strict=True))
    seen = {"seen": case.seen(), "distance": case.distance(), "alibi": case.slopes}
    return reference.partial(q, k, v, scale=case.scale, softcap=case.softcap, **seen)


def is_tensor_core_case(case: Case) -> bool:
    """Whether a GPU backend takes the tensor-core kernel for it."""
    few = case.group * case.queries < 4 and not case.v_dim
    return case.tensor_cores and case.dtype != "float32" and not few


#: All at once, over a ragged batch with drafts.
_ALL_RULES: dict[str, Any] = {
    "queries": 5,
    "kv_heads": 1,
    "batch": 2,
    "tokens": 260,
    "lengths": (260, 171),
    "drafts": 35,
    "splits": 4,
    "causal": True,
    "window": (60, 4),
    "leading": 4,
    "softcap": 9.0,
    "alibi": True,
    "runs": ((3, 2, 100), (300, 1, 160)),
}

_TYPES = ("float32", "float16", "bfloat16")
#: For the kernels that multiply and add, and for tensor cores: type, and query heads of a KV head.
_BOTH = (("float32", 1), ("bfloat16", 4))
_MANY_RUNS = tuple((7 * i, 2, 4) for i in range(10))
CASES = (
    # Every type and head dimension, one query head for each KV head.
    *(Case(t, d, splits=3) for t in _TYPES for d in HEAD_DIMS),
    # Grouping and several queries: tensor cores for 16 bits, multiply-add for the rest.
    *(Case(t, d, group=4, splits=2) for t in _TYPES[1:] for d in HEAD_DIMS),
    Case("float32", 512, group=3, splits=3),
    # Many rows: one tile of 32 or 64, several, and those of wide heads.
    *(Case("float16", d, group=8, queries=7, kv_heads=1, splits=4) for d in HEAD_DIMS),
    Case("bfloat16", 128, group=4, queries=7, splits=3),
    Case("bfloat16", 128, group=4, queries=35, kv_heads=1, batch=2, lengths=(150, 40), splits=3),
    Case("bfloat16", 64, group=2, queries=64, kv_heads=1, tokens=130, drafts=64, splits=3),
    Case("bfloat16", 80, group=4, queries=40, kv_heads=1, tokens=130, drafts=40, splits=3),
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
    *(Case(t, 64, group=g, tokens=0, splits=2) for t, g in _BOTH),
    # Splits by the backend's own choice, and many of them.
    *(Case(t, 64, group=g, tokens=tokens) for t, g in _BOTH for tokens in (1, 700)),
    Case("float32", 64, kv_heads=1, tokens=1100, splits=35),
    # Memory that is laid out otherwise.
    *(Case(t, 64, group=g, layout=one, splits=2) for t, g in _BOTH for one in ("heads", "gaps")),
    # Scores of +-1e4.
    *(Case(t, 64, group=g, scores=1e4, splits=3) for t, g in _BOTH),
    # Draft trees, also with more than one word of the mask and with nothing before the draft.
    Case("bfloat16", 64, group=2, queries=9, kv_heads=1, tokens=90, drafts=9, splits=2),
    Case("float32", 64, queries=5, kv_heads=1, tokens=90, drafts=70, splits=2),
    Case(
        "bfloat16", 64, queries=8, kv_heads=1, batch=3, tokens=90, lengths=(90, 70, 80), drafts=70, splits=2
    ),
    # Queries that see some tokens only, beside what is drawn: windows within the shard and beyond it.
    Case("float32", 128, tokens=600, window=(90, 0), q_at=(333,), splits=3),
    Case("bfloat16", 64, group=4, window=(9, 9), q_at=(900,), splits=2),
    # Several queries of a tile whose intervals lie apart; rows of wide heads.
    Case(
        *("float16", 64),
        queries=3,
        tokens=700,
        window=(20, 5),
        q_at=(600, 30, 300),
        splits=5,
        tensor_cores=False,
    ),
    Case("bfloat16", 64, queries=11, group=3, kv_heads=1, tokens=700, window=(20, 5), leading=3, splits=3),
    Case("float16", 256, queries=17, kv_heads=1, tokens=200, causal=True, lengths=(160,), splits=2),
    # Padded on the left beyond what a query sees; a sequence that sees nothing.
    Case("bfloat16", 64, group=4, batch=3, causal=True, q_at=(120,), begins=(0, 33, 130), splits=2),
    Case("float32", 64, batch=3, tokens=90, window=(40, 40), lengths=(90, 61, 0), q_at=(80,), splits=2),
    # Many runs; scores that softcap saturates; a query far behind all tokens.
    Case("float32", 64, tokens=40, runs=_MANY_RUNS, alibi=True, q_at=(50,), splits=2),
    Case("float32", 64, softcap=50.0, scores=1e4, splits=2),
    Case("float32", 64, group=2, alibi=True, q_at=(5000000,), splits=3),
    # All rules at once.
    *(
        Case(t, d, group=g, **_ALL_RULES)
        for t, d, g in (("float32", 64, 1), ("float16", 80, 4), ("bfloat16", 128, 4), ("float32", 256, 2))
    ),
    # Splits by the backend's own choice, from what is seen.
    *(Case(t, 64, group=g, tokens=3000, window=(700, 0), q_at=(2000,)) for t, g in _BOTH),
    # Latent attention: one head of keys, of which the values are a part.
    *(
        Case(t, 576, v_dim=512, kv_heads=1, group=g, splits=3)
        for t, g in (("float16", 16), ("bfloat16", 16), ("bfloat16", 3), ("float16", 30), ("float16", 37))
    ),
    Case(
        "bfloat16", 576, v_dim=512, kv_heads=1, group=16, batch=4, tokens=70, lengths=(70, 33, 1, 0), splits=2
    ),
    Case("bfloat16", 576, v_dim=512, kv_heads=1, group=128, batch=2, lengths=(150, 33), splits=3),
    Case("bfloat16", 576, v_dim=512, kv_heads=1, group=4, tokens=0, splits=2),
    Case("bfloat16", 576, v_dim=512, kv_heads=2, group=4, layout="heads", splits=2),
    Case("float16", 576, v_dim=512, kv_heads=1, group=5, queries=4, layout="gaps", splits=2),
    Case("bfloat16", 576, v_dim=512, kv_heads=1, group=16, tokens=700),
    Case("bfloat16", 576, v_dim=512, group=6, **_ALL_RULES),
)

#: What no kernel of a GPU takes: latent caches in float32, other head dimensions; and edges of the C kernels.
ON_THE_PROCESSOR = (
    *(Case("bfloat16", 128, batch=2, tokens=n) for n in (15, 16, 63, 64, 65, 1024, 1025, 4096)),
    *(Case("float32", 64, g, k, batch=2, tokens=83) for k, g in ((5, 1), (3, 2), (1, 7), (2, 5))),
    *(Case("float16", n, kv_heads=1, tokens=40) for n in (*range(8, 136, 8), 160, 192, 200)),
    # Many rows of a KV head, by tiles.
    *(
        Case(t, d, group=g, kv_heads=k, queries=n, tokens=tokens, batch=batch)
        for batch, n, k, g, d, tokens in (
            *((1, 20, 2, 2, 64, 100), (2, 49, 1, 1, 128, 509), (1, 3, 1, 20, 80, 1100)),
            *((2, 400, 1, 2, 24, 47), (1, 40, 1, 1, 8, 49), (1, 35, 1, 1, 200, 0)),
            *((1, 9, 2, 4, 256, 1), (1, 11, 1, 7, 72, 96)),
        )
        for t in _TYPES
    ),
    *(Case(t, 24, group=2, scores=1e4, tokens=300, queries=2) for t in _TYPES),
    *(Case("float32", 576, v_dim=512, kv_heads=1, group=g, splits=3) for g in (16, 21)),
    Case("float32", 576, v_dim=512, kv_heads=1, group=16, batch=4, tokens=70, lengths=(70, 33, 1, 0)),
    Case("float32", 576, v_dim=512, kv_heads=1, group=4, tokens=0),
    Case("float32", 576, v_dim=512, kv_heads=1, group=8, scores=60.0),
    Case("float32", 576, v_dim=512, group=6, **_ALL_RULES),
)
