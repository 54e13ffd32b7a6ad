"""Attention over keys that are split over ranks: inputs, what is right, and a check of anybody's function.

``python conformance.py MODULE:FUNCTION`` calls FUNCTION for every case of vectors.npz, as README.md says.
NumPy is all that this needs. ``python conformance.py --write`` draws the vectors anew.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

VECTORS = Path(__file__).with_name("vectors.npz")


class Case(NamedTuple):
    """q [batch, queries, heads, dim], k, v [batch, tokens, kv_heads, dim], float32. owner [tokens]: the rank
    that holds each token, of `ranks`; lengths [batch]: the tokens of each sequence, whose last ones the
    queries are. window: how many tokens before its own a query sees, -1 for all; sinks [heads] or None.
    out [batch, queries, heads, dim], lse [batch, heads, queries], float64: what is right."""

    name: str
    q: Any
    k: Any
    v: Any
    owner: Any
    ranks: int
    lengths: Any
    scale: float
    causal: bool
    window: int
    sinks: Any
    out: Any
    lse: Any

    def shards(self, ranks: int | None = None) -> list[dict[str, Any]]:
        """What each rank holds: k, v of its tokens, their positions, and how many of each sequence count.
        ranks: fewer of them, which share the shards in turn."""
        size = self.ranks if ranks is None else ranks
        held = [np.flatnonzero(self.owner % size == rank) for rank in range(size)]
        return [
            {
                "k": np.ascontiguousarray(self.k[:, at]), "v": np.ascontiguousarray(self.v[:, at]),
                "positions": at, "lengths": (at < self.lengths[:, None]).sum(1),
            }
            for at in held
        ]  # fmt: skip

    @property
    def q_positions(self) -> Any:
        """Where the queries stand, int64 [batch, queries]."""
        return np.maximum(self.lengths[:, None] - self.q.shape[1] + np.arange(self.q.shape[1]), 0)

    def check(self, out: Any, lse: Any, factor: float = 1.0) -> None:
        """Raise `AssertionError` unless they are right in float32. lse None: not looked at. factor: so many
        times the error of float32, for kernels of 16 bits."""
        group = self.q.shape[2] // self.k.shape[2]
        products = np.einsum("bqhd,bthd->bhqt", abs(self.q), abs(np.repeat(self.k, group, 2)))
        size = factor * (2 + self.scale * products.max(initial=0)) * 1e-6
        for name, got, right, most in (
            ("out", out, self.out, size * abs(self.v).max(initial=0)),
            ("lse", lse, self.lse, size + factor * 1e-5),
        ):
            if got is None and name == "lse":
                continue
            got = np.asarray(got, np.float64)
            assert got.shape == right.shape, f"{self.name}: {name} is {got.shape}, right is {right.shape}"
            same = np.isclose(got, right, rtol=0, atol=most)
            where = tuple(np.argwhere(~same)[0].tolist()) if not same.all() else ()
            assert same.all(), (
                f"{self.name}: {name} is {got[where]} at {where}, right is {right[where]} within {most:.1e}"
            )


def cases() -> Iterator[Case]:
    """All that vectors.npz holds."""
    with np.load(VECTORS) as file:
        for name in file["names"].tolist():
            given = {key: file[f"{name}/{key}"] for key in Case._fields[1:] if f"{name}/{key}" in file}
            for key in "qkv":  # whole numbers of sixteenths
                given[key] = given[key].astype(np.float32) / 16
            kinds = {"ranks": int, "scale": float, "causal": bool, "window": int}
            given |= {key: kind(given[key]) for key, kind in kinds.items()}
            yield Case(name, **{"sinks": None, **given})


def attention(case: Case) -> tuple[Any, Any]:
    """out and lse of a case in float64, from all keys at once."""
    group = case.q.shape[2] // case.k.shape[2]
    q, k, v = (
        one.astype(np.float64) for one in (case.q, *(np.repeat(x, group, 2) for x in (case.k, case.v)))
    )
    logits = case.scale * np.einsum("bqhd,bthd->bhqt", q, k)
    tokens, stands = np.arange(k.shape[1]), case.q_positions[:, None, :, None]
    seen = np.broadcast_to(tokens < case.lengths[:, None, None, None], logits.shape)
    if case.causal:
        seen = seen & (tokens <= stands) & ((case.window < 0) | (tokens >= stands - case.window))
    logits = np.where(seen, logits, -np.inf)
    sinks = np.full(q.shape[2], -np.inf) if case.sinks is None else case.sinks.astype(np.float64)
    most = np.maximum(logits.max(-1, initial=-np.inf), sinks[:, None])
    most = np.where(np.isfinite(most), most, 0)
    weights = np.exp(logits - most[..., None])
    total = weights.sum(-1) + np.exp(sinks[:, None] - most)
    out = np.einsum("bhqt,bthd->bqhd", weights / np.where(total, total, 1)[..., None], v)
    with np.errstate(divide="ignore"):
        return out, most + np.log(total)


def check(attend: Callable[..., tuple[Any, Any]], factor: float = 1.0) -> list[str]:
    """What is wrong with `attend`, a line for each case that fails."""
    wrong = []
    for case in cases():
        given = {"scale": case.scale, "sinks": case.sinks, "q_positions": case.q_positions}
        out, lse = attend(case.q, case.shards(), **given, causal=case.causal, window=case.window)
        try:
            case.check(out, lse, factor)
        except AssertionError as error:
            wrong.append(str(error))
    return wrong


#: Name -> what differs from: 4 ranks in blocks, 2 sequences of 37 tokens, 4 heads on 2 KV heads of 16.
DRAWN: dict[str, dict[str, Any]] = {
    "blocks": {},
    "in_turn": {"owner": "in turn", "lengths": [37, 20]},
    "any_owner": {"owner": "drawn", "lengths": [37, 1]},
    "a_rank_without_tokens": {"owner": "three of four", "lengths": [5, 36]},
    "more_ranks_than_tokens": {"ranks": 5, "tokens": 3, "lengths": [3, 2]},
    "nothing_to_see": {"lengths": [0, 9]},
    "sinks": {"sinks": True},
    "sinks_of_any_owner": {"owner": "drawn", "lengths": [11, 30], "sinks": True},
    "sinks_alone": {"lengths": [0, 37], "sinks": True},
    "causal": {"owner": "in turn", "queries": 3, "lengths": [37, 21], "causal": True},
    "window": {"owner": "drawn", "lengths": [37, 30], "causal": True, "window": 6},
    "window_and_sinks": {"queries": 2, "causal": True, "window": 4, "sinks": True},
    "large_logits": {"scale": 40.0},
    "one_kv_head": {"heads": 8, "kv_heads": 1, "dim": 64, "tokens": 29, "lengths": [29, 12]},
}


def write() -> None:
    """Draw the inputs, whole numbers of sixteenths below 4: exact in float16 and bfloat16, too."""
    draw, arrays = np.random.default_rng(20), {"names": np.array(list(DRAWN))}
    for name, how in DRAWN.items():
        tokens, ranks, dim = how.get("tokens", 37), how.get("ranks", 4), how.get("dim", 16)
        heads, kv_heads = how.get("heads", 4), how.get("kv_heads", 2)
        owners = {
            "in turn": np.arange(tokens) % ranks,
            "drawn": draw.integers(0, ranks, tokens),
            "three of four": draw.choice([0, 1, 3], tokens),
        }
        given = {
            "q": draw.integers(-63, 64, (2, how.get("queries", 1), heads, dim), np.int8),
            **{key: draw.integers(-63, 64, (2, tokens, kv_heads, dim), np.int8) for key in "kv"},
            "owner": owners.get(how.get("owner"), np.sort(np.arange(tokens) * ranks // tokens)),
            "ranks": ranks, "lengths": np.array(how.get("lengths", [tokens, tokens])),
            "scale": how.get("scale", 0.125), "causal": how.get("causal", False),
            "window": how.get("window", -1),
        }  # fmt: skip
        if how.get("sinks"):
            given["sinks"] = draw.integers(-16, 80, heads).astype(np.float32) / 16
        floats = {key: given[key].astype(np.float32) / 16 for key in "qkv"}
        blank = {"sinks": None, "out": None, "lse": None}
        out, lse = attention(Case(name, **{**blank, **given, **floats}))
        arrays |= {f"{name}/{key}": value for key, value in {**given, "out": out, "lse": lse}.items()}
    np.savez_compressed(VECTORS, **arrays)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
        sys.exit()
    sys.path.insert(0, "")
    module, _, function = sys.argv[1].partition(":")
    factor = float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
    problems = check(getattr(importlib.import_module(module), function), factor)
    print("\n".join(problems) or f"all {len(DRAWN)} cases are right")
    sys.exit(int(bool(problems)))
