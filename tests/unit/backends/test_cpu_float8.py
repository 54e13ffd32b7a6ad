"""Caches of 8-bit elements under queries of other types: exact on what the elements stand for."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.support import verbs
from tests.support.problems import FLOAT8, assert_exact
from treeattn import reference
from treeattn.attention.mask import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs
from treeattn.backends import cpu
from treeattn.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("build")


def attend(*arrays, **given):
    return verbs.attention(cpu, *arrays, **{"scale": 0.1} | given)


def widened(k, v, k_scale, v_scale):
    """What elements of 8 bits stand for."""
    scales = np.reshape(k_scale, (-1, 1)), np.reshape(v_scale, (-1, 1))
    return [array.astype(np.float64) * scale for array, scale in zip((k, v), scales, strict=True)]


@pytest.mark.parametrize("stored", FLOAT8)
def test_every_element_is_read_right(stored):
    """One token: the output is its value, by whole vectors and by the last few elements of a row."""
    every = np.arange(256, dtype=np.uint8).view(stored)
    for head_dim in (8, 40, 64):
        for row in np.resize(every, (-(-256 // head_dim), head_dim)):
            v = row.reshape(1, 1, 1, -1)
            out, _ = attend(np.zeros(v.shape, np.float32), np.zeros_like(v), v, v_scale=[0.5])
            np.testing.assert_array_equal(out, 0.5 * v.astype(np.float32))
            q = np.eye(head_dim, dtype=np.float32)[None, :, None]  # each query: one element of the key
            _, lse = attend(q, v, np.zeros_like(v), k_scale=[2.0], scale=1.0)
            scores = 2 * row.astype(np.float32)
            expected = np.where(np.isposinf(scores), np.nan, scores)  # inf - inf in the softmax
            others = np.isfinite(row.astype(np.float32)).all()  # else 0 * inf
            np.testing.assert_array_equal(lse[0, 0], expected if others else np.full_like(expected, np.nan))


@pytest.mark.parametrize("stored", FLOAT8)
@pytest.mark.parametrize("queried", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize(
    "shape", [(2, 1, 2, 1, 128, 1100), (1, 3, 2, 4, 72, 300), (3, 2, 1, 5, 40, 17), (1, 9, 2, 4, 72, 100)]
)
def test_exact_on_the_widened_elements(stored, queried, shape):
    batch, queries, kv_heads, group, head_dim, tokens = shape
    rng = np.random.default_rng(tokens)
    q = rng.standard_normal((batch, queries, kv_heads * group, head_dim)).astype(queried)
    k = (3 * rng.standard_normal((batch, tokens, kv_heads, head_dim))).astype(stored)
    v = rng.standard_normal(k.shape).astype(stored)
    scales = dict(zip(("k_scale", "v_scale"), rng.uniform(0.3, 2, (2, kv_heads)).tolist(), strict=True))
    assert_exact(attend(q, k, v, **scales), q, *widened(k, v, **scales), scale=0.1)


def test_bits_and_rules():
    """uint8 where it is named; a window with drafts, whose tokens are copied side by side."""
    rng = np.random.default_rng(5)
    q = rng.standard_normal((1, 2, 4, 64)).astype(np.float32)
    k, v = (rng.standard_normal((1, 200, 2, 64)).astype(ml_dtypes.float8_e5m2) for _ in "kv")
    visible = MaskTables(Rules(causal=True, window=(50, 0), softcap=3.0), 1, 2)
    mask = np.array([[[True, False, True, False, True], [False, True, True, False, False]]])
    visible.update(Runs([(0, 1, 195)]), 200, None, [100, 150], mask)
    scales = {"k_scale": [1.0, 2.0], "v_scale": [0.5, 3.0]}
    seen = reference.seen(np.arange(195), [[100, 150]], causal=True, window=(50, 0))
    rules = {"softcap": 3.0, "seen": np.concatenate([seen, mask], 2)}
    got = attend(q, k, v, tables=visible, **scales)
    assert_exact(got, q, *widened(k, v, **scales), scale=0.1, **rules)
    raw = attend(q, k.view(np.uint8), v.view(np.uint8), kv_dtype="float8_e5m2", **scales)
    assert all(map(np.array_equal, raw, attend(q, k, v, **scales)))


def test_what_does_not_fit_is_refused():
    q, k = np.zeros((1, 1, 4, 8), np.float32), np.zeros((1, 3, 2, 8), ml_dtypes.float8_e5m2)
    with pytest.raises(ArgumentError, match="3 scales for 2 KV heads"):
        attend(q, k, k, k_scale=[1.0, 1.0, 1.0], v_scale=[1.0, 1.0])
    for queried, stored in ((q.astype(ml_dtypes.float8_e5m2), k), (q, k.view(np.uint8))):
        with pytest.raises(ArgumentError, match="with float32 records"):
            attend(queried, stored, stored)
