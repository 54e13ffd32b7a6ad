"""Many rows per KV head: exact for every build, type, tail and rule, whatever lies where nobody looks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support import verbs
from treeattn import reference
from treeattn.attention.mask import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs
from treeattn.backends import cpu

Array = np.ndarray[Any, Any]
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def inputs(
    shape: tuple[int, int, int, int, int, int], dtype: str = "float32", seed: int = 0
) -> tuple[Array, Array, Array]:
    """q, k, v for (batch, queries, heads, kv_heads, head_dim, tokens)."""
    batch, queries, heads, kv_heads, head_dim, tokens = shape
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, queries, heads, head_dim)).astype(TYPES[dtype])
    k, v = (rng.standard_normal((batch, tokens, kv_heads, head_dim)).astype(TYPES[dtype]) for _ in "kv")
    return q, k, v


def attend(
    q: Array, k: Array, v: Array, scale: float = 0.2, lengths: Array | None = None, **plan: Any
) -> tuple[Array, Array]:
    batch, queries, heads, _ = q.shape
    records = np.full((batch, heads, queries, v.shape[3] + 2), 77, np.float32)
    cpu.PlannedAttention(records, scale=scale, **plan)(q, k, v, lengths)
    out, lse = (
        np.empty((batch, queries, heads, v.shape[3]), np.float32),
        np.empty(records.shape[:3], np.float32),
    )
    verbs.finish(cpu, records, out, lse)
    return out, lse


def assert_exact(got: tuple[Array, Array], *arrays: Array, scale: float = 0.2, **rules: Any) -> None:
    part = reference.partial(*arrays, scale=scale, **rules)
    out, lse = reference.combine([part])
    out_bound, lse_bound = reference.error_bounds([part])
    assert abs(got[0] - out).max(initial=0) <= out_bound
    unseen = lse == -np.inf
    assert (got[1][unseen] == -np.inf).all()
    assert abs(got[1][~unseen] - lse[~unseen]).max(initial=0) <= lse_bound


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 20, 4, 2, 64, 100), (2, 49, 4, 4, 128, 1009), (1, 3, 20, 1, 80, 2100), (2, 400, 2, 1, 24, 47),
        (1, 40, 1, 1, 8, 49), (1, 35, 1, 1, 200, 0), (1, 9, 8, 2, 256, 1), (1, 11, 7, 1, 72, 96),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("each_isa")
def test_exact(shape: tuple[int, int, int, int, int, int], dtype: str) -> None:
    q, k, v = inputs(shape, dtype, sum(shape))
    lengths = np.array([shape[5] // (b + 1) for b in range(shape[0])])
    for b, length in enumerate(lengths):
        k[b, length:] = v[b, length:] = np.nan
    got = attend(q, k, v, lengths=lengths)
    assert_exact(got, q, k, v, lengths=lengths)
    for threads in (2, 7):
        for ours, theirs in zip(attend(q, k, v, lengths=lengths, threads=threads), got, strict=True):
            assert np.array_equal(ours, theirs)


@pytest.mark.usefixtures("each_isa")
def test_exact_where_equal_terms_round_alike() -> None:
    q, k, v = inputs((1, 33, 1, 1, 256, 3000))
    q[...], k[...], v[...] = 1.1, 1.3, 0.7
    assert_exact(attend(q, k, v, 1.0), q, k, v, scale=1.0)


RULES: list[dict[str, Any]] = [
    {"causal": True}, {"window": (40, 0)}, {"window": (150, 30), "leading": 3}, {"window": (None, -1 + 1)},
    {"softcap": 5.0}, {"causal": True, "alibi": True}, {"window": (60, 5), "softcap": 2.0, "alibi": True},
    {"causal": True, "drafts": 37}, {"window": (0, 0), "drafts": 70, "alibi": True},
]  # fmt: skip


def visible_case(
    rules: dict[str, Any], shape: tuple[int, int, int, int, int, int], seed: int
) -> tuple[MaskTables, dict[str, Any], Array]:
    """The tables of a step, the same for the oracle, and its lengths."""
    batch, queries, heads, _, _, tokens = shape
    rng = np.random.default_rng(seed)
    given = dict(rules)
    drafts = given.pop("drafts", 0)
    slopes = rng.uniform(-0.01, 0.5, heads) if given.pop("alibi", False) else None
    visible = MaskTables(Rules(**given, alibi=slopes), batch, queries)
    context = tokens - drafts
    runs = Runs([(2, 3, context // 3), (4 * context, 1, context - context // 3)])
    q_positions = rng.choice(np.concatenate((runs.positions(), [0, 9 * context])), (batch, queries))
    lengths = rng.integers(drafts + context // 2, tokens + 1, batch)
    mask = rng.random((batch, queries, drafts)) < 0.5
    draft_positions = 9 * context + rng.integers(0, 9, (batch, drafts))
    visible.update(*(runs, tokens, lengths, q_positions), *((mask, draft_positions) if drafts else ()))
    context_seen = reference.seen(
        runs.positions(), q_positions, **{name: given[name] for name in given if name != "softcap"}
    )
    seen = np.zeros((batch, queries, tokens), bool)
    positions = np.zeros((batch, tokens), np.int64)
    for b, begin in enumerate(lengths - drafts):
        seen[b, :, :begin] = context_seen[b, :, :begin]
        seen[b, :, begin : begin + drafts] = mask[b]
        positions[b, :context] = runs.positions()
        positions[b, begin : begin + drafts] = draft_positions[b]
    distance = q_positions[:, :, None] - positions[:, None]
    oracle = {"seen": seen, "softcap": rules.get("softcap"), "alibi": slopes, "distance": distance}
    return visible, oracle, lengths


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("shape", [(2, 70, 4, 2, 40, 1300), (1, 17, 2, 1, 16, 150), (2, 300, 1, 1, 8, 211)])
@pytest.mark.usefixtures("each_isa")
def test_exact_for_what_is_visible(rules: dict[str, Any], shape: tuple[int, int, int, int, int, int]) -> None:
    visible, oracle, _ = visible_case(rules, shape, len(str(rules)))
    q, k, v = inputs(shape, "bfloat16")
    unseen = ~oracle["seen"].any(axis=1)
    clean = attend(q, k, v, tables=visible)
    k[unseen] = v[unseen] = np.nan
    for threads in (1, 3):
        got = attend(q, k, v, tables=visible, threads=threads)
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(got, clean, strict=True))
    k[unseen] = v[unseen] = 0
    assert_exact(clean, q, k, v, **oracle)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.usefixtures("each_isa")
def test_a_row_is_not_touched_by_what_others_see(bad: float) -> None:
    shape = (1, 200, 2, 2, 24, 200)
    visible = MaskTables(Rules(causal=True), 1, 200)
    visible.update(Runs([(0, 1, 200)]), 200, q_positions=np.arange(200))
    q, k, v = inputs(shape)
    clean = attend(q, k, v, tables=visible)
    k[0, 120:, :, 3] = v[0, 120:, :, 5] = bad
    out, lse = attend(q, k, v, tables=visible)
    assert np.array_equal(out[:, :120], clean[0][:, :120])
    assert np.array_equal(lse[..., :120], clean[1][..., :120])
    assert not np.isfinite(out[:, 120:, :, 5]).any()


@pytest.mark.usefixtures("each_isa")
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    visible, _, lengths = visible_case({"window": (200, 0), "leading": 5}, (1, 300, 1, 1, 32, 1500), 3)
    q, k, v = inputs((1, 300, 1, 1, 32, 1500), "float16")
    out, lse = attend(q, k, v, tables=visible)
    for chosen in (slice(10, 42), slice(150, 260), slice(260, 300)):
        part = MaskTables(visible.rules, 1, chosen.stop - chosen.start)
        part.update(visible.runs, 1500, lengths, visible.q_positions[:, chosen])
        part_out, part_lse = attend(q[:, chosen], k, v, tables=part)
        assert np.array_equal(part_out, out[:, chosen])
        assert np.array_equal(part_lse, lse[..., chosen])


@pytest.mark.usefixtures("each_isa")
def test_distances_of_a_query_far_from_all_it_sees() -> None:
    visible = MaskTables(Rules(alibi=(0.5, 0.01)), 1, 33)
    visible.update(Runs([(0, 1, 300)]), 300, q_positions=np.full(33, 10_000_000))
    q, k, v = inputs((1, 33, 2, 1, 16, 300))
    out, lse = attend(q, k, v, tables=visible)
    distance = 10_000_000.0 - np.arange(300.0)[None, None].repeat(33, 1)
    part = reference.partial(q, k, v, scale=0.2, alibi=(0.5, 0.01), distance=distance)
    exact = reference.combine([part])
    assert abs(out - exact[0]).max() < 2e-5
    np.testing.assert_allclose(lse, exact[1], rtol=1e-7)  # which is all that float32 holds of it
