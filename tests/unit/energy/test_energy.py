"""The energy on one rank: its definition, its laws, and what it refuses."""

from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawn import examples
from tests.support.energies import SCALE, dense, diagonal, random_energy
from tests.support.exporters import Dlpack, OnGpu
from treeattn import Rules, Shard, energy, partial, reference
from treeattn.decoder.reducers import plan_reducer
from treeattn.energy import average
from treeattn.energy.average import records
from treeattn.errors import ArgumentError, RestrictionError

CAUSAL = Rules(causal=True)


def values_themselves(row, values):
    """The features of a gradient."""
    return values


def close(got, wanted, bound):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=bound)


@examples(40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.sampled_from([None, 0.0, 1.0, 3.0]), st.booleans())
def test_results_are_what_they_are_defined_as(seed, tokens, tilt, causal):
    """Query i of the last three sees all keys but the 2 - i last."""
    zeta, q, k, v = random_energy(tokens + 3, seed=seed)
    zeta, seen = None if tilt is None else tilt * zeta, None
    options = {"scale": SCALE, "rules": Rules(causal=causal)}
    if causal:
        seen = np.arange(tokens + 3) <= np.arange(tokens, tokens + 3)[:, None]
    value, mean, covariance = dense(zeta, q, k, v, seen)
    close(energy.value(zeta, q, k, v, **options), value, 1e-12)
    close(energy.gradient(zeta, q, k, v, **options), mean, 1e-12)
    total = energy.total(zeta, q, k, v, **options)
    assert total.dtype == np.float64
    np.testing.assert_allclose(total, value.sum(axis=(1, 2)), rtol=1e-13)
    got = energy.moments(q, k, v, zeta=zeta, covariance=True, **options)
    for one, wanted in zip(got, (mean, diagonal(covariance), covariance), strict=True):
        close(one, wanted, 1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_gradient_at_zero_is_attention(dtype):
    zeta, q, k, v = random_energy(dtype=dtype)
    whole = reference.partial(q, k, v, scale=1 / np.sqrt(8))  # which is the default
    out, lse = reference.combine([whole])
    bounds = (1e-13, 1e-13) if dtype is np.float64 else reference.error_bounds([whole])
    for zero in (None, zeta * 0):
        got = energy.gradient(zero, q, k, v), energy.value(zero, q, k, v)
        assert got[0].dtype == got[1].dtype == (np.float64 if dtype is np.float64 else np.float32)
        close(got[0], out, bounds[0])
        close(got[1], lse, bounds[1])


@pytest.mark.parametrize(("dtype", "unit"), [(np.float32, 2.0**-24), (np.float64, 1e-15)])
@pytest.mark.parametrize("mean", [0, 1e2, 1e4])
def test_a_variance_is_exact_relative_to_the_spread_of_the_values(dtype, unit, mean):
    """However far they lie from 0; the sum of squares alone loses everything at a mean of 1e4."""
    _, q, k, v = random_energy(300, dtype=dtype)
    v = (v + mean).astype(dtype)
    _, exact_mean, exact = dense(None, q, k, v, wide=np.longdouble)
    got_mean, variance, covariance = energy.moments(q, k, v, scale=SCALE, covariance=[1, 4, 0])
    apart = exact_mean - np.repeat(v.mean(axis=1, dtype=np.longdouble), 2, axis=1)[:, None]
    wanted = diagonal(exact)
    assert (abs(variance - wanted) <= 10 * unit * (wanted + apart**2)).all()
    assert (abs(got_mean - exact_mean) <= 4 * unit * (mean + 4)).all()
    spread = np.sqrt((wanted + apart**2)[..., [1, 4, 0]])
    bound = 10 * unit * spread[..., None] * spread[..., None, :]
    assert (abs(covariance - exact[..., [1, 4, 0], :][..., [1, 4, 0]]) <= bound).all()
    if mean == 1e4 and dtype is np.float32:
        squares = energy.gradient(None, q, k, (v * v).astype(dtype), scale=SCALE)
        assert abs(squares - got_mean * got_mean - wanted).max() > 1


@pytest.mark.parametrize(
    ("call", "width"),
    [
        (lambda zeta, *cache: energy.value(zeta, *cache), 2),
        (lambda zeta, *cache: energy.total(zeta, *cache, rules=CAUSAL), 2),
        (lambda zeta, *cache: energy.log_likelihood(zeta, cache[0], *cache), 2),
        (lambda zeta, *cache: energy.gradient(zeta, *cache), 10),
        (lambda zeta, *cache: energy.moments(*cache), 18),
        (lambda zeta, *cache: energy.moments(*cache, covariance=[5]), 18),
        (lambda zeta, *cache: energy.moments(*cache, covariance=[5, 1, 2]), 21),
        (lambda zeta, *cache: energy.moments(*cache, covariance=True), 46),
    ],
)
def test_everything_is_one_reduction_of_records(monkeypatch, call, width):
    reduced = []

    @contextmanager
    def counted(*given):
        with plan_reducer(*given) as reducer:
            yield lambda: (reduced.append(given[5].shape), reducer())

    monkeypatch.setattr(average, "plan_reducer", counted)
    call(*random_energy())
    assert reduced == [(2, 4, 3, width)]


def test_what_no_query_sees_changes_no_bit():
    """NaN beyond lengths, and in tokens that stand after every query."""
    zeta, q, k, v = random_energy(dtype=np.float32)
    dirty = k.copy(), v.copy()
    for array in dirty:
        array[0, 20:], array[1, 9:] = np.nan, np.inf
    clean, spoilt = (
        (energy.gradient(zeta, q, *cache, lengths=[20, 9]), *energy.moments(q, *cache, lengths=[20, 9]))
        for cache in ((k, v), dirty)
    )
    for one, other in zip(clean, spoilt, strict=True):
        np.testing.assert_array_equal(one, other)
    clean, spoilt = (Shard(*cache, positions=np.arange(23)) for cache in ((k, v), dirty))
    options = {"rules": CAUSAL, "q_positions": [4, 8, 6]}
    np.testing.assert_array_equal(
        energy.gradient(zeta, q, spoilt, **options), energy.gradient(zeta, q, clean, **options)
    )


def test_the_rounding_of_a_large_maximum_is_made_good_in_the_sums():
    """Scores of 1e5 and some: float32 holds a shard's maximum to 0.004, its weight among others to 1e-7."""
    _, q, k, v = random_energy(dtype=np.float32)
    q[..., 0], k[..., 0] = 1000, 100 / SCALE
    parts = []
    for begin, end in ((0, 9), (9, 23)):
        intervals = np.broadcast_to([0, 0, begin, end], (2, 3, 4))
        parts.append(records(q, None, k, v, SCALE, intervals, values_themselves, np.float32))
    partial.merge(*parts)
    out, lse = np.empty(q.shape, np.float32), np.empty((2, 4, 3), np.float32)
    partial.finish(parts[0], out, lse)
    value, mean, _ = dense(None, q, k, v)
    close(out, mean, 1e-6)
    np.testing.assert_allclose(lse, value, rtol=2.0**-23)


def test_arrays_of_any_library_and_bits_of_bfloat16():
    arrays = random_energy(dtype=ml_dtypes.bfloat16)
    wanted = energy.gradient(*arrays)
    bits = [array.view(np.uint16) for array in arrays]
    np.testing.assert_array_equal(energy.gradient(*bits[:2], Shard(*bits[2:], dtype="bfloat16")), wanted)
    np.testing.assert_array_equal(energy.gradient(*(Dlpack(array, code=4) for array in bits)), wanted)
    stored = K.astype(np.float16), V.astype(np.float16)
    widened = energy.value(Z, Q, *(array.astype(np.float32) for array in stored))
    np.testing.assert_array_equal(energy.value(Z, Q, *stored), widened)


Z, Q, K, V = random_energy(dtype=np.float32)
#: Besides these, whatever `decode` refuses of the same arrays, which are admitted by the same call.
BAD = {
    "zeta of another shape": (lambda: energy.value(Z[:1], Q, K, V), r"zeta has shape \[1, 3, 4, 8\]"),
    "zeta of another type": (lambda: energy.value(Z.astype("f8"), Q, K, V), "zeta is float64.*float32"),
    "k of another type": (lambda: energy.gradient(Z, Q, K.astype("f2"), V), "k and v are of one type"),
    "no v": (lambda: energy.gradient(Z, Q, K), "v is missing"),
    "scaled": (lambda: energy.gradient(Z, Q, Shard(K, V, k_scale=2.0)), "k_scale of the Shard: an energy"),
    "a list": (lambda: energy.value(Z.tolist(), Q, K, V), "zeta is a list: pass an array"),
    "a GPU": (lambda: energy.value(OnGpu(Z), Q, K, V), "zeta lies on a GPU: .* on the CPU"),
    "scale": (lambda: energy.value(Z, Q, K, V, scale=np.nan), "scale must be a finite number"),
    "lengths": (lambda: energy.value(Z, Q, K, V, lengths=[99, 1]), "lengths .* between 0 and the shard's"),
    "few positions": (
        lambda: energy.value(Z, Q, Shard(K, V, positions=np.arange(9)), rules=CAUSAL),
        "has positions for 9 of its 23 tokens",
    ),
    "q_positions": (
        lambda: energy.value(Z, Q, K, V, rules=CAUSAL, q_positions=[1, 2]), "q_positions have shape"
    ),
    "more queries than tokens": (
        lambda: energy.value(Z, Q, K[:, :2], V[:, :2], rules=CAUSAL),
        "causal ask for the positions of queries: pass q_positions=",
    ),
    "z of another batch": (
        lambda: energy.log_likelihood(None, Q[:1], Q, K, V), r"z has shape \[1, 3, .* = \[2, 3, 4, 8\]"
    ),
    "z of whole numbers": (lambda: energy.log_likelihood(Z, Q.astype(int), Q, K, V), "arrays of int64"),
    "no dimension": (lambda: energy.moments(Q, K, V, covariance=[8]), r"covariance=\[8\]: True, or distinct"),
    "a dimension twice": (lambda: energy.moments(Q, K, V, covariance=[1, 1]), "distinct dimensions"),
    "half a dimension": (lambda: energy.moments(Q, K, V, covariance=[1.5]), "TypeError: 'float'"),
    "no dimensions": (lambda: energy.moments(Q, K, V, covariance=3.5), "TypeError: 'float'"),
}  # fmt: skip
REFUSED = {
    "head_scatter": "leaves each rank a slice of heads, and an energy is a sum over all keys",
    "kv_ring": "kv_ring attends while it communicates.*take another scheme",
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_named(case):
    call, message = BAD[case]
    with pytest.raises(ArgumentError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_schemes_and_rules_without_such_a_reduction_are_refused():
    for scheme, message in REFUSED.items():
        with pytest.raises(RestrictionError, match=message):
            energy.gradient(Z, Q, K, V, scheme=scheme)
    with pytest.raises(RestrictionError, match="softcap: an energy is that of plain scores"):
        energy.gradient(Z, Q, K, V, rules=Rules(softcap=3.0))
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        energy.gradient(Z, Q, K, V, causal=True)
