"""Attention on the processor to what a query may see, against the float64 oracle with a full mask."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.support import verbs
from tests.support.problems import draw, random_qkv
from treeattn import reference
from treeattn.attention.mask import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs, as_runs
from treeattn.backends import cpu
from treeattn.errors import ArgumentError

SHARDS = 3


def rules_of(case):
    """Without sinks, which are not the kernels' business."""
    case.rules.pop("sink_logits", None)
    return Rules(**case.rules)


def records_of(case, rank, lay=np.asarray, **plan):
    """lay: puts q, k and v where they are to lie."""
    visible = MaskTables(rules_of(case), *case.q.shape[:2])
    given = case.shard(rank)
    q, k = lay(given["q"]), lay(given["k"])
    v = k[..., : case.v_dim] if case.v_dim else lay(given["v"])
    plan |= {name: given[name] for name in ("k_scale", "v_scale") if name in given}
    table = given.get("block_table")
    tokens = k.shape[1] * (1 if table is None else table.shape[1])
    visible.update(
        *(as_runs(given["positions"]), tokens, given["lengths"], given["q_positions"]),
        *(given.get(name) for name in ("mask", "draft_positions", "begins")),
    )
    return verbs.records_of(cpu, q, k, v, scale=case.scale, tables=visible, block_table=table, **plan)


@pytest.mark.parametrize("block", range(4))
@pytest.mark.usefixtures("build")
def test_drawn_cases_are_exact(block):
    for seed in range(block, 60, 4):
        case = draw(seed, SHARDS)
        whole = records_of(case, 0)
        for rank in range(1, SHARDS):
            verbs.merge(cpu, whole, records_of(case, rank))
        out, lse = verbs.finished(cpu, whole)
        wanted_out, wanted_lse, out_bound, lse_bound = case.expected()
        where = f"seed {seed}, {case.rules}, q {case.q.shape} {case.q.dtype}, k {case.k.shape}"
        np.testing.assert_allclose(out, wanted_out, rtol=0, atol=out_bound, err_msg=where)
        np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=lse_bound, err_msg=where)


def test_threads_change_no_bit(build):
    if build == "numpy":
        pytest.skip("NumPy has no threads here")
    for seed in range(0, 60, 3):
        case = draw(seed, SHARDS)
        once = records_of(case, 0)
        for threads in (2, 7):
            assert records_of(case, 0, threads=threads).tobytes() == once.tobytes()


def one(queries, tokens, dtype=np.float32, **rules):
    """One sequence of four query heads over two KV heads, and what computes its records."""
    arrays = random_qkv(tokens, queries=queries, head_dim=72, dtype=dtype)
    visible = MaskTables(Rules(**rules), 1, queries)
    return *arrays, visible, lambda *given: verbs.records_of(cpu, *given, scale=0.2, tables=visible)


@pytest.mark.usefixtures("build")
def test_what_nobody_may_see_changes_no_bit():
    """NaN in every token that no query sees, near edges of intervals and between drafts too."""
    q, k, v, visible, attend = one(3, 300, causal=True, window=(70, 0), leading=3)
    mask = np.zeros((1, 3, 40), bool)
    mask[0, 0, [0, 1, 17]] = mask[0, 1, [2, 33]] = mask[0, 2, [17, 18, 39]] = True
    stands = [[250, 120, 251]]
    visible.update(Runs([(0, 1, 260)]), 300, None, stands, mask)
    records = attend(q, k, v)
    seen = reference.seen(np.arange(260), stands, causal=True, window=(70, 0), leading=3)
    hidden = ~np.concatenate([seen, mask], 2).any((0, 1))
    assert hidden[:260].any()
    assert hidden[260:].any()
    k[:, hidden], v[:, hidden] = np.nan, np.nan
    assert records.tobytes() == attend(q, k, v).tobytes()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.usefixtures("build")
def test_which_of_tokens_and_heads_are_neighbours_changes_no_bit(dtype):
    """Where some queries see of a stretch what others do not."""
    q, k, v, visible, attend = one(5, 700, dtype, causal=True)
    visible.update(Runs([(0, 1, 700)]), 700, None, [690, 20, 333, 699, 512])
    swapped = [np.ascontiguousarray(one.swapaxes(1, 2)).swapaxes(1, 2) for one in (k, v)]
    assert attend(q, k, v).tobytes() == attend(q, *swapped).tobytes()


@pytest.mark.usefixtures("build")
def test_what_one_query_may_not_see_changes_no_bit_of_it():
    q, k, v, visible, attend = one(2, 200, causal=True)
    visible.update(Runs([(0, 1, 200)]), 200, None, [150, 199])
    records = attend(q, k, v)
    k[:, 151:], v[:, 151:] = np.nan, np.inf
    again = attend(q, k, v)
    assert records[:, :, 0].tobytes() == again[:, :, 0].tobytes()
    assert np.isnan(again[:, :, 1]).all()


@pytest.mark.usefixtures("build")
def test_all_that_is_there_is_seen_to_the_same_bits():
    q, k, v, visible, attend = one(1, 2500, causal=True)
    visible.update(Runs([(0, 1, 2500)]), 2500, None, [2499])
    assert attend(q, k, v).tobytes() == verbs.records_of(cpu, q, k, v, scale=0.2).tobytes()


@pytest.mark.parametrize("softcap", [0.01, 1.0, 50.0])
@pytest.mark.usefixtures("build")
def test_softcap_from_tiny_scores_to_infinite_ones(softcap):
    q, k, v, visible, attend = one(1, 90, softcap=softcap)
    k[0, :, :, 0] = np.geomspace(1e-6, 1e4, 90)[:, None]
    visible.update(None, 90)
    out, lse = verbs.finished(cpu, attend(q, k, v))
    wanted_out, wanted_lse = reference.attention(q, k, v, scale=0.2, softcap=softcap)
    if softcap < 50:  # else bounded by the scores themselves
        np.testing.assert_allclose(out, wanted_out, rtol=0, atol=3e-6 * np.abs(v).max())
    np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=1e-5 + 3e-7 * softcap)
    k[0, 3], k[0, 4, :, 0] = np.nan, np.inf
    assert np.isnan(attend(q, k, v)).all()


def test_alibi_from_far_away_keeps_its_digits(build):
    """A query far behind all tokens: the weights among them must not drown in the distance."""
    if build == "numpy":
        pytest.skip("the distance itself is rounded there")
    slopes = [0.5, -0.25, 0.125, 1.0]
    q, k, v, visible, attend = one(2, 1500, alibi=slopes)
    runs, stands = Runs([(0, 3, 700), (90_000, 1, 800)]), [[1_000_000, 120]]
    visible.update(runs, 1500, None, stands)
    out, lse = verbs.finished(cpu, attend(q, k, v))
    distance = np.asarray(stands)[:, :, None] - runs.positions()
    wanted_out, wanted_lse = reference.attention(q, k, v, scale=0.2, alibi=slopes, distance=distance)
    np.testing.assert_allclose(out, wanted_out, rtol=0, atol=1e-5 * np.abs(v).max())
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-7, atol=1e-5)


@pytest.mark.usefixtures("build")
def test_a_planned_attention_follows_its_tables():
    """Other runs, a mask that comes and goes, other arrays: each step as if planned anew."""
    q, k, v, visible, _ = one(2, 300, causal=True, window=(40, 5), alibi=[0.1, 0.2, 0.3, 0.4])
    records = np.empty((1, 4, 2, 74), np.float32)
    planned = cpu.PlannedAttention(records, scale=0.2, tables=visible)
    mask = np.array([[[True, False, True], [False, True, True]]])
    for runs, tokens, stands, drafts in (
        (Runs([(0, 1, 300)]), 300, [200, 70], None),
        (Runs([(0, 2, 300)]), 300, [200, 70], None),
        (Runs([(0, 2, 300)]), 203, [200, 70], mask),
        (Runs([(5, 7, 300)]), 280, [1200, 701], mask[:, ::-1]),
        (Runs([(5, 7, 300)]), 0, [1200, 701], None),
        (Runs([(5, 7, 300)]), 299, [1200, 701], None),
    ):
        drafts_stand = None if drafts is None else [[201, 202, 202]]
        fresh, arrays = MaskTables(visible.rules, 1, 2), (q, k[:, :tokens], v[:, :tokens])
        for tables in (visible, fresh):
            tables.update(runs, tokens, None, stands, drafts, drafts_stand)
        planned(*arrays)
        anew = verbs.records_of(cpu, *arrays, scale=0.2, tables=fresh)
        assert records.tobytes() == anew.tobytes()


def test_tables_of_other_arrays_are_refused(build):
    if build == "numpy":
        pytest.skip("slices end with the array there")
    q, k, v, visible, attend = one(1, 50, causal=True)
    visible.update(Runs([(0, 1, 50)]), 50, None, [49])
    with pytest.raises(ArgumentError, match="sequence 0 sees tokens beyond the 49 of these arrays"):
        attend(q, k[:, :49], v[:, :49])
