"""Caches in pages on the processor: the bits of a cache in a row, whatever lies in the other places."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.support import verbs
from tests.support.drawn import sample
from tests.support.pages import in_pages
from tests.support.problems import random_qkv
from treeattn.attention.mask import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs
from treeattn.backends import cpu
from treeattn.errors import ArgumentError


def attend(q, k, v, lengths=None, table=None, **plan):
    given = {"scale": 0.2, "lengths": lengths, "block_table": table, **plan}
    return verbs.records_of(cpu, q, k, v, **given).tobytes()


@pytest.mark.parametrize("page_size", [1, 7, 64])
@pytest.mark.parametrize(
    ("group", "queries", "tokens"), sample(2, [(1, 1, 2500), (4, 1, 300), (3, 3, 700), (4, 17, 300)])
)
@pytest.mark.parametrize(
    "kind", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float64]
)
@pytest.mark.usefixtures("build")
def test_pages_have_the_bits_of_a_cache_in_a_row(kind, group, queries, tokens, page_size):
    rng = np.random.default_rng(group)
    is_8 = np.dtype(kind).itemsize == 1
    q, k, v = random_qkv(tokens, batch=2, queries=queries, heads=2 * group, head_dim=72, dtype=kind)
    q = q.astype(np.float32 if is_8 else kind)
    lengths = np.array([tokens, tokens * 2 // 3])
    plan = {"k_scale": [0.5, 2.0], "v_scale": [1.0, 3.0]} if is_8 else {}
    (pages, table), (values, _) = (in_pages(one, page_size, lengths) for one in (k, v))
    assert attend(q, pages, values, lengths, table, **plan) == attend(q, k, v, lengths, **plan)
    look = MaskTables(Rules(causal=True, window=(90, None), leading=3, alibi=[0.1] * 2 * group), 2, queries)
    mask = rng.random((2, queries, 5)) < 0.5
    q_positions = rng.integers(0, tokens, (2, queries))
    look.update(Runs([(0, 1, tokens)]), tokens, lengths, q_positions, mask, np.full((2, 5), tokens))
    assert attend(q, pages, values, None, table, tables=look, **plan) == attend(q, k, v, tables=look, **plan)


@pytest.mark.usefixtures("build")
def test_latent_heads_in_pages():
    """Values within the keys, and all heads over one."""
    q, k, _ = random_qkv(400, batch=2, heads=6, kv_heads=1, head_dim=96)
    lengths = np.array([400, 90])
    pages, table = in_pages(k, 16, lengths)
    whole = attend(q, k, k[..., :64], lengths)
    assert attend(q, pages, pages[..., :64], lengths, table) == whole


def test_threads_change_no_bit(build):
    if build == "numpy":
        pytest.skip("NumPy has no threads here")
    for queries in (1, 40):
        q, k, v = random_qkv(3000, queries=queries, kv_heads=4)
        (pages, table), (values, _) = in_pages(k, 64), in_pages(v, 64)
        given = q, pages, values, np.array([3000]), table
        assert attend(*given, threads=3) == attend(*given, threads=1)


@pytest.mark.usefixtures("build")
def test_pages_of_any_strides():
    """Keys and values in one array, heads before slots: as engines hold them."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 1, 4, 64)).astype(np.float32)
    both = rng.standard_normal((9, 2, 2, 16, 64)).astype(np.float32)  # page, k or v, head, slot
    k, v = both[:, 0].swapaxes(1, 2), both[:, 1].swapaxes(1, 2)
    table, lengths = np.array([[3, 0, 8], [5, 1, 2]]), np.array([40, 48])
    row = [one[table].reshape(2, 48, 2, 64) for one in (k, v)]
    assert attend(q, k, v, lengths, table) == attend(q, *row, lengths)


@pytest.mark.usefixtures("build")
def test_a_plan_follows_its_block_table():
    """Written in place, another one, a longer one, and none: each step as if planned anew."""
    rng = np.random.default_rng(0)
    shapes = (2, 1, 4, 64), (9, 16, 2, 64), (9, 16, 2, 64)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    records = np.empty((2, 4, 1, 66), np.float32)
    planned = cpu.PlannedAttention(records, scale=0.2)
    table = np.array([[3, 0], [5, 1]], np.int32)

    def step(pages, lengths, table):
        planned(q, k[:pages], v[:pages], np.array(lengths), table)
        assert records.tobytes() == attend(q, k[:pages], v[:pages], np.array(lengths), table)

    step(9, [20, 32], table)
    table[0, 1] = 7
    step(9, [20, 32], table)
    step(9, [20, 32], table[::-1])
    step(9, [33, 20], np.array([[3, 0, 8], [5, 1, -1]]))
    step(2, [16, 3], None)
    step(9, [20, 32], table)
    table[1, 0] = 9
    with pytest.raises(ArgumentError, match="block_table"):
        planned(q, k, v, np.array([20, 32]), table)


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": None}, "needs lengths"),
        ({"lengths": np.array([33])}, "more than the block table holds"),
        ({"lengths": np.array([-1])}, r"lengths\[0\] = -1"),
        ({"table": np.array([[0, 5]])}, "have 5 pages"),
        ({"table": np.array([[0, -1]])}, "no page"),
        ({"table": np.array([[1, 1]])}, "twice"),
        ({"table": np.array([0, 1])}, "whole numbers"),
        ({"k": np.zeros((5, 16, 3, 64), np.float32)}, "must be"),
        ({"k": np.zeros((5, 0, 2, 64), np.float32)}, r"must be \[pages, page_size, kv_heads, head_dim\]"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    q, k = np.zeros((1, 1, 2, 64), np.float32), np.zeros((5, 16, 2, 64), np.float32)
    given = {"k": k, "v": k, "lengths": np.array([20]), "table": np.array([[0, 1]])} | change
    with pytest.raises(ArgumentError, match=message):
        attend(q, **given)
