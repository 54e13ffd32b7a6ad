"""Many rows per KV head: exact for every build, type, tail and rule, whatever lies where nobody looks."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.support import verbs
from tests.support.problems import assert_exact, random_qkv
from treeattn import reference
from treeattn.attention.mask import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs
from treeattn.backends import cpu

pytestmark = pytest.mark.usefixtures("each_isa")
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def inputs(shape, dtype="float32", seed=0):
    """q, k, v for (batch, queries, heads, kv_heads, head_dim, tokens)."""
    names = ("batch", "queries", "heads", "kv_heads", "head_dim", "tokens")
    return random_qkv(**dict(zip(names, shape, strict=True)), dtype=TYPES[dtype], seed=seed)


def attend(*arrays, **given):
    return verbs.attention(cpu, *arrays, **{"scale": 0.2} | given)


def same_bits(ours, theirs):
    return all(map(np.array_equal, ours, theirs))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 20, 4, 2, 64, 100), (2, 49, 4, 4, 128, 1009), (1, 3, 20, 1, 80, 2100), (2, 400, 2, 1, 24, 47),
        (1, 40, 1, 1, 8, 49), (1, 35, 1, 1, 200, 0), (1, 9, 8, 2, 256, 1), (1, 11, 7, 1, 72, 96),
    ],
)  # fmt: skip
def test_exact(shape, dtype):
    q, k, v = inputs(shape, dtype, sum(shape))
    lengths = np.array([shape[5] // (b + 1) for b in range(shape[0])])
    for b, length in enumerate(lengths):
        k[b, length:] = v[b, length:] = np.nan
    got = attend(q, k, v, lengths=lengths)
    assert_exact(got, q, k, v, scale=0.2, lengths=lengths)
    for threads in (2, 7):
        assert same_bits(attend(q, k, v, lengths=lengths, threads=threads), got)


def test_exact_where_equal_terms_round_alike():
    q, k, v = inputs((1, 33, 1, 1, 256, 3000))
    q[...], k[...], v[...] = 1.1, 1.3, 0.7
    assert_exact(attend(q, k, v, scale=1.0), q, k, v, scale=1.0)


RULES = [
    {"causal": True}, {"window": (40, 0)}, {"window": (150, 30), "leading": 3}, {"window": (None, -1 + 1)},
    {"softcap": 5.0}, {"causal": True, "alibi": True}, {"window": (60, 5), "softcap": 2.0, "alibi": True},
    {"causal": True, "drafts": 37}, {"window": (0, 0), "drafts": 70, "alibi": True},
]  # fmt: skip


def visible_case(rules, shape, seed):
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
    softcap = given.pop("softcap", None)
    context_seen = reference.seen(runs.positions(), q_positions, **given)
    seen = np.zeros((batch, queries, tokens), bool)
    positions = np.zeros((batch, tokens), np.int64)
    for b, begin in enumerate(lengths - drafts):
        seen[b, :, :begin] = context_seen[b, :, :begin]
        seen[b, :, begin : begin + drafts] = mask[b]
        positions[b, :context] = runs.positions()
        positions[b, begin : begin + drafts] = draft_positions[b]
    distance = q_positions[:, :, None] - positions[:, None]
    return visible, {"seen": seen, "softcap": softcap, "alibi": slopes, "distance": distance}, lengths


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("shape", [(2, 70, 4, 2, 40, 1300), (1, 17, 2, 1, 16, 150), (2, 300, 1, 1, 8, 211)])
def test_exact_for_what_is_visible(rules, shape):
    visible, oracle, _ = visible_case(rules, shape, len(str(rules)))
    q, k, v = inputs(shape, "bfloat16")
    unseen = ~oracle["seen"].any(axis=1)
    clean = attend(q, k, v, tables=visible)
    k[unseen] = v[unseen] = np.nan
    for threads in (1, 3):
        assert same_bits(attend(q, k, v, tables=visible, threads=threads), clean)
    k[unseen] = v[unseen] = 0
    assert_exact(clean, q, k, v, scale=0.2, **oracle)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_is_not_touched_by_what_others_see(bad):
    visible = MaskTables(Rules(causal=True), 1, 200)
    visible.update(Runs([(0, 1, 200)]), 200, q_positions=np.arange(200))
    q, k, v = inputs((1, 200, 2, 2, 24, 200))
    clean = attend(q, k, v, tables=visible)
    k[0, 120:, :, 3] = v[0, 120:, :, 5] = bad
    out, lse = attend(q, k, v, tables=visible)
    assert same_bits((out[:, :120], lse[..., :120]), (clean[0][:, :120], clean[1][..., :120]))
    assert not np.isfinite(out[:, 120:, :, 5]).any()


def test_a_row_does_not_depend_on_the_rows_beside_it():
    shape = (1, 300, 1, 1, 32, 1500)
    visible, _, lengths = visible_case({"window": (200, 0), "leading": 5}, shape, 3)
    q, k, v = inputs(shape, "float16")
    out, lse = attend(q, k, v, tables=visible)
    for chosen in (slice(10, 42), slice(150, 260), slice(260, 300)):
        part = MaskTables(visible.rules, 1, chosen.stop - chosen.start)
        part.update(visible.runs, 1500, lengths, visible.q_positions[:, chosen])
        assert same_bits(attend(q[:, chosen], k, v, tables=part), (out[:, chosen], lse[..., chosen]))


def test_distances_of_a_query_far_from_all_it_sees():
    visible = MaskTables(Rules(alibi=(0.5, 0.01)), 1, 33)
    visible.update(Runs([(0, 1, 300)]), 300, q_positions=np.full(33, 10_000_000))
    q, k, v = inputs((1, 33, 2, 1, 16, 300))
    out, lse = attend(q, k, v, tables=visible)
    distance = 10_000_000.0 - np.arange(300.0)[None, None].repeat(33, 1)
    exact = reference.attention(q, k, v, scale=0.2, alibi=(0.5, 0.01), distance=distance)
    assert abs(out - exact[0]).max() < 2e-5
    np.testing.assert_allclose(lse, exact[1], rtol=1e-7)  # which is all that float32 holds of it
