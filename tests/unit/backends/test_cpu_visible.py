"""Attention on the processor to what a query may see, against the float64 oracle with a full mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support import verbs
from tests.support.problems import Case, draw
from treeattn import reference
from treeattn.attention.mask import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs, as_runs
from treeattn.backends import cpu
from treeattn.errors import ArgumentError

Array = np.ndarray[Any, Any]
SHARDS = 3


def rules_of(case: Case) -> Rules:
    """Without sinks, which are not the kernels' business."""
    case.rules.pop("sink_logits", None)
    return Rules(**case.rules)


def records_of(case: Case, rank: int, lay: Callable[[Array], Array] = np.asarray, **plan: Any) -> Array:
    """lay: puts q, k and v where they are to lie."""
    batch, queries, heads, _ = case.q.shape
    visible = MaskTables(rules_of(case), batch, queries)
    dtype = np.float64 if case.q.dtype == np.float64 else np.float32
    given = case.shard(rank)
    q, k = lay(given["q"]), lay(given["k"])
    v = k[..., : case.v_dim] if case.v_dim else lay(given["v"])
    records = np.full((batch, heads, queries, v.shape[3] + 2), 77, dtype)
    plan |= {name: given[name] for name in ("k_scale", "v_scale") if name in given}
    planned = cpu.PlannedAttention(records, scale=case.scale, tables=visible, **plan)
    table = given.get("block_table")
    tokens = k.shape[1] * (1 if table is None else table.shape[1])
    visible.update(
        *(as_runs(given["positions"]), tokens, given["lengths"], given["q_positions"]),
        *(given.get(name) for name in ("mask", "draft_positions", "begins")),
    )
    planned(q, k, v, None, table)
    return records


@pytest.mark.parametrize("block", range(4))
@pytest.mark.usefixtures("build")
def test_drawn_cases_are_exact(block: int) -> None:
    for seed in range(block, 60, 4):
        case = draw(seed, SHARDS)
        whole = records_of(case, 0)
        for rank in range(1, SHARDS):
            verbs.merge(cpu, whole, records_of(case, rank))
        out, lse = np.empty(case.q.shape, whole.dtype), np.empty(whole.shape[:3], whole.dtype)
        verbs.finish(cpu, whole, out, lse)
        wanted_out, wanted_lse, out_bound, lse_bound = case.expected()
        where = f"seed {seed}, {case.rules}, q {case.q.shape} {case.q.dtype}, k {case.k.shape}"
        np.testing.assert_allclose(out, wanted_out, rtol=0, atol=out_bound, err_msg=where)
        np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=lse_bound, err_msg=where)


def test_threads_change_no_bit(build: str) -> None:
    if build == "numpy":
        pytest.skip("NumPy has no threads here")
    for seed in range(0, 60, 3):
        case = draw(seed, SHARDS)
        once = records_of(case, 0)
        for threads in (2, 7):
            assert records_of(case, 0, threads=threads).tobytes() == once.tobytes()


def one(
    queries: int, tokens: int, dtype: Any = np.float32, **rules: Any
) -> tuple[Array, Array, Array, MaskTables]:
    """One sequence of four query heads over two KV heads."""
    rng = np.random.default_rng(queries + tokens)
    q = rng.standard_normal((1, queries, 4, 72)).astype(dtype)
    k, v = (rng.standard_normal((1, tokens, 2, 72)).astype(dtype) for _ in "kv")
    return q, k, v, MaskTables(Rules(**rules), 1, queries)


@pytest.mark.usefixtures("build")
def test_what_nobody_may_see_changes_no_bit() -> None:
    """NaN in every token that no query sees, near edges of intervals and between drafts too."""
    q, k, v, visible = one(3, 300, causal=True, window=(70, 0), leading=3)
    mask = np.zeros((1, 3, 40), bool)
    mask[0, 0, [0, 1, 17]] = mask[0, 1, [2, 33]] = mask[0, 2, [17, 18, 39]] = True
    stands = [[250, 120, 251]]
    records, again = (np.empty((1, 4, 3, 74), np.float32) for _ in "12")
    visible.update(Runs([(0, 1, 260)]), 300, None, stands, mask)
    verbs.attend(cpu, q, k, v, records, scale=0.2, tables=visible)
    seen = reference.seen(np.arange(260), stands, causal=True, window=(70, 0), leading=3)
    hidden = ~np.concatenate([seen, mask], 2).any((0, 1))
    assert hidden[:260].any()
    assert hidden[260:].any()
    k[:, hidden], v[:, hidden] = np.nan, np.nan
    verbs.attend(cpu, q, k, v, again, scale=0.2, tables=visible)
    assert records.tobytes() == again.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.usefixtures("build")
def test_which_of_tokens_and_heads_are_neighbours_changes_no_bit(dtype: Any) -> None:
    """Where some queries see of a stretch what others do not."""
    q, k, v, visible = one(5, 700, dtype, causal=True)
    visible.update(Runs([(0, 1, 700)]), 700, None, [690, 20, 333, 699, 512])
    records, swapped = (np.empty((1, 4, 5, 74), np.float32) for _ in "12")
    verbs.attend(cpu, q, k, v, records, scale=0.2, tables=visible)
    k, v = (np.ascontiguousarray(one.swapaxes(1, 2)).swapaxes(1, 2) for one in (k, v))
    verbs.attend(cpu, q, k, v, swapped, scale=0.2, tables=visible)
    assert records.tobytes() == swapped.tobytes()


@pytest.mark.usefixtures("build")
def test_what_one_query_may_not_see_changes_no_bit_of_it() -> None:
    q, k, v, visible = one(2, 200, causal=True)
    visible.update(Runs([(0, 1, 200)]), 200, None, [150, 199])
    records, again = (np.empty((1, 4, 2, 74), np.float32) for _ in "12")
    verbs.attend(cpu, q, k, v, records, scale=0.2, tables=visible)
    k[:, 151:], v[:, 151:] = np.nan, np.inf
    verbs.attend(cpu, q, k, v, again, scale=0.2, tables=visible)
    assert records[:, :, 0].tobytes() == again[:, :, 0].tobytes()
    assert np.isnan(again[:, :, 1]).all()


@pytest.mark.usefixtures("build")
def test_all_that_is_there_is_seen_to_the_same_bits() -> None:
    q, k, v, visible = one(1, 2500, causal=True)
    visible.update(Runs([(0, 1, 2500)]), 2500, None, [2499])
    records, plain = (np.empty((1, 4, 1, 74), np.float32) for _ in "12")
    verbs.attend(cpu, q, k, v, records, scale=0.2, tables=visible)
    verbs.attend(cpu, q, k, v, plain, scale=0.2)
    assert records.tobytes() == plain.tobytes()


@pytest.mark.parametrize("softcap", [0.01, 1.0, 50.0])
@pytest.mark.usefixtures("build")
def test_softcap_from_tiny_scores_to_infinite_ones(softcap: float) -> None:
    q, k, v, visible = one(1, 90, softcap=softcap)
    k[0, :, :, 0] = np.geomspace(1e-6, 1e4, 90)[:, None]
    visible.update(None, 90)
    records = np.empty((1, 4, 1, 74), np.float32)
    verbs.attend(cpu, q, k, v, records, scale=0.2, tables=visible)
    part = reference.partial(q, k, v, scale=0.2, softcap=softcap)
    out_bound, lse_bound = 3e-6 * np.abs(v).max(), 1e-5 + 3e-7 * softcap
    out, lse = np.empty(q.shape, np.float32), np.empty((1, 4, 1), np.float32)
    verbs.finish(cpu, records, out, lse)
    wanted_out, wanted_lse = reference.combine([part])
    if softcap < 50:  # else bounded by the scores themselves
        np.testing.assert_allclose(out, wanted_out, rtol=0, atol=out_bound)
    np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=lse_bound)
    k[0, 3], k[0, 4, :, 0] = np.nan, np.inf
    verbs.attend(cpu, q, k, v, records, scale=0.2, tables=visible)
    assert np.isnan(records).all()


def test_alibi_from_far_away_keeps_its_digits(build: str) -> None:
    """A query far behind all tokens: the weights among them must not drown in the distance."""
    if build == "numpy":
        pytest.skip("the distance itself is rounded there")
    slopes = [0.5, -0.25, 0.125, 1.0]
    q, k, v, visible = one(2, 1500, alibi=slopes)
    runs, stands = Runs([(0, 3, 700), (90_000, 1, 800)]), [[1_000_000, 120]]
    visible.update(runs, 1500, None, stands)
    records = np.empty((1, 4, 2, 74), np.float32)
    verbs.attend(cpu, q, k, v, records, scale=0.2, tables=visible)
    out, lse = np.empty(q.shape, np.float32), np.empty((1, 4, 2), np.float32)
    verbs.finish(cpu, records, out, lse)
    distance = np.asarray(stands)[:, :, None] - runs.positions()
    part = reference.partial(q, k, v, scale=0.2, alibi=slopes, distance=distance)
    wanted_out, wanted_lse = reference.combine([part])
    np.testing.assert_allclose(out, wanted_out, rtol=0, atol=1e-5 * np.abs(v).max())
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-7, atol=1e-5)


@pytest.mark.usefixtures("build")
def test_a_planned_attention_follows_its_tables() -> None:
    """Other runs, a mask that comes and goes, other arrays: each step as if planned anew."""
    q, k, v, visible = one(2, 300, causal=True, window=(40, 5), alibi=[0.1, 0.2, 0.3, 0.4])
    records, fresh = (np.empty((1, 4, 2, 74), np.float32) for _ in "12")
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
        for tables, run in ((visible, planned), (MaskTables(visible.rules, 1, 2), None)):
            tables.update(runs, tokens, None, stands, drafts, drafts_stand)
            run = run or cpu.PlannedAttention(fresh, scale=0.2, tables=tables)
            run(q, k[:, :tokens], v[:, :tokens])
        assert records.tobytes() == fresh.tobytes()


def test_tables_of_other_arrays_are_refused(build: str) -> None:
    if build == "numpy":
        pytest.skip("slices end with the array there")
    q, k, v, visible = one(1, 50, causal=True)
    visible.update(Runs([(0, 1, 50)]), 50, None, [49])
    records = np.empty((1, 4, 1, 74), np.float32)
    with pytest.raises(ArgumentError, match="sequence 0 sees tokens beyond the 49 of these arrays"):
        verbs.attend(cpu, q, k[:, :49], v[:, :49], records, scale=0.2, tables=visible)
