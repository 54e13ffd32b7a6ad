"""Attention on the processor to what a query may see, against the float64 oracle with a full mask."""

import numpy as np
import pytest

from tests.support import verbs
from tests.support.problems import random_qkv
from treeattn import reference
from treeattn.attention.arguments import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs
from treeattn.backends import cpu
from treeattn.errors import ArgumentError


def one(queries, tokens, dtype=np.float32, **rules):
    """One sequence of four query heads over two KV heads, and what computes its records."""
    arrays = random_qkv(tokens, queries=queries, head_dim=72, dtype=dtype)
    visible = MaskTables(Rules(**rules), 1, queries)
    return *arrays, visible, lambda *given: verbs.records_of(cpu, *given, scale=0.2, tables=visible)


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


def test_tables_of_other_arrays_are_refused(build):
    if build == "numpy":
        pytest.skip("slices end with the array there")
    q, k, v, visible, attend = one(1, 50, causal=True)
    visible.update(Runs([(0, 1, 50)]), 50, None, [49])
    with pytest.raises(ArgumentError, match="sequence 0 sees tokens beyond the 49 of these arrays"):
        attend(q, k[:, :49], v[:, :49])
