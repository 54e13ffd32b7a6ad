"""The prefill over real ranks against the float64 reference: drawn shapes, layouts, rules and types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import treeattn
from tests.support.ranks import raised_by_all
from treeattn import Rules, reference
from treeattn.errors import ArgumentError

pytestmark = pytest.mark.mpi


def drawn(comm, seed):
    """Whole q, k, v of a problem, their positions on each rank, and what is passed beside them."""
    draw = np.random.default_rng(seed)
    batch, kv_heads, tokens = (int(draw.integers(1, most)) for most in (4, 4, 40))
    heads, head_dim, v_dim = kv_heads * int(draw.integers(1, 4)), *(int(n) for n in draw.choice([8, 16], 2))
    dtype = draw.choice([np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
    arrays = [
        draw.standard_normal((batch, tokens, *axes)).astype(dtype)
        for axes in ((heads, head_dim), (kv_heads, head_dim), (kv_heads, v_dim))
    ]
    owners = draw.integers(0, comm.size, tokens)
    layout = [None, "zigzag", "interleaved", "drawn"][draw.integers(4)]
    if layout == "drawn":
        own = positions = np.flatnonzero(owners == comm.rank)
    else:
        rule = treeattn.shards.parse_layout(layout or "contiguous")
        own = np.concatenate([np.arange(tokens)[run] for run in rule.runs(tokens, comm.rank, comm.size)])
        positions = layout
    rules = [
        {"causal": True},
        {"causal": True, "window": (int(draw.integers(0, 9)), None), "leading": int(draw.integers(3))},
        {"causal": True, "softcap": 2.0, "alibi": draw.random(heads)},
        {"causal": True, "sink_logits": draw.standard_normal(heads)},
        {"window": (3, 5)},
    ][draw.integers(5)]
    begins = draw.integers(0, tokens, batch) if draw.integers(2) else None
    return arrays, own, {"positions": positions, "rules": Rules(**rules), "begins": begins}


def test_reproducible_queries_have_the_bits_of_one_rank(comm):
    for seed in range(8):
        arrays, own, options = drawn(comm, seed)
        arrays = [array.astype(np.float32) if array.dtype == np.float64 else array for array in arrays]
        how = {"comm": comm, "scale": 0.3, "reproducible": "tokens"}
        out, lse = treeattn.prefill(*(array[:, own] for array in arrays), **how, **options)
        alone = how | {"comm": MPI.COMM_SELF}
        whole, whole_lse = treeattn.prefill(*arrays, **alone, **(options | {"positions": None}))
        assert out.tobytes() == whole[:, own].tobytes()
        assert lse.tobytes() == whole_lse[..., own].tobytes()


def test_every_query_sees_what_the_rules_let_it_see(comm):
    for seed in range(12):
        arrays, own, options = drawn(comm, seed)
        q, k, v = arrays
        out, lse = treeattn.prefill(*(array[:, own] for array in arrays), comm=comm, scale=0.3, **options)
        places, rules = np.arange(q.shape[1]), options["rules"]
        given = {name: getattr(rules, name) for name in ("causal", "window", "leading")}
        begins = 0 if options["begins"] is None else options["begins"]
        seen = reference.seen(places, np.broadcast_to(places, q.shape[:2]), begins=begins, **given)
        extra = {"softcap": rules.softcap, "alibi": rules.alibi}
        if rules.alibi is not None:
            extra["distance"] = np.broadcast_to(places[:, None] - places, (len(q), len(places), len(places)))
        part = reference.partial(q, k, v, scale=0.3, seen=seen, **extra)
        parts = [part] if rules.sink_logits is None else [part, reference.sink(part, rules.sink_logits)]
        wanted, bounds = reference.combine(parts), reference.error_bounds(parts)
        for got, whole, bound in zip((out, lse), wanted, bounds, strict=True):
            rows = np.take(whole, own, 1 if got is out else 2)
            finite = np.isfinite(rows)
            np.testing.assert_array_equal(np.isfinite(got), finite)
            np.testing.assert_allclose(got[finite], rows[finite], rtol=0, atol=bound)


def test_what_cannot_be_is_told_by_all(comm):
    one = np.ones((1, 2, 2, 8), np.float32)
    odd = comm.rank == comm.size - 1
    cases = {
        "v is float64": {"v": one.astype(float) if odd else one},
        "k is float32 .1, 3, 2, 8.": {"k": np.ones((1, 3, 2, 8), np.float32)},
        "k has heads of 16": {"k": np.ones((1, 2, 2, 16), np.float32) if odd else one},
        "2 query heads cannot be grouped over 3": {"k": np.ones((1, 2, 3, 8), np.float32)},
    }
    if comm.size > 1:
        cases["both claim position 0"] = {"positions": [0, 1 + comm.rank]}
        cases["scale differs between ranks"] = {"scale": 0.1 + odd}
    for words, change in cases.items():
        given = {"q": one, "k": one, "v": one, "comm": comm, **change}
        raised_by_all(comm, lambda given=given: treeattn.prefill(**given), words, ArgumentError)
