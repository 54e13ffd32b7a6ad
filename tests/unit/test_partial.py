"""The monoid: its laws to the bit, and its exactness; tests/support/records_contract.py has its builds."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.drawn import examples
from tests.support.records_contract import bits, merged
from treeattn import partial

HEAD_DIM = 21  # not a multiple of any vector width: remainders are merged too


def same_bits(a, b):
    return bool((bits(a) == bits(b)).all())


def random_records(rng, count, spread, head_dim=HEAD_DIM):
    """Random bit patterns of every magnitude, with maxima near each other."""
    exponent = rng.uniform(-spread, spread, (count, head_dim + 2))
    records = (rng.standard_normal(exponent.shape) * np.exp2(exponent)).astype(np.float32)
    records[:, 0] = rng.standard_normal(count) * rng.choice([1e-3, 1, 30, 1e4], count)
    return records


SPECIALS = np.array(
    [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, 1.0, -87.0, -87.00001, 1e4], np.float32
)
#: A quiet and a signalling NaN with payloads, either sign.
ODD_NANS = np.array([0xFFC12345, 0x7F800001, 0xFF800001, 0x7FFFFFFF], np.uint32).view(np.float32)


def special_records():
    """All pairs of special maxima; numerators run through all pairs of special values."""
    values = np.concatenate((SPECIALS, ODD_NANS))
    pairs = np.array(list(itertools.product(values, values)), np.float32)
    a = np.empty((len(pairs), HEAD_DIM + 2), np.float32)
    b = np.empty_like(a)
    a[:, 0], b[:, 0] = pairs[:, 0], pairs[:, 1]
    for i in range(1, a.shape[1]):
        turned = np.roll(pairs, 7 * i, axis=0)
        a[:, i], b[:, i] = turned[:, 0], turned[:, 1]
    return a, b


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_identity_changes_nothing(dtype):
    records = random_records(np.random.default_rng(1), 100, 20).astype(dtype)
    nothing = partial.identity((100,), HEAD_DIM, dtype)
    assert nothing.shape == records.shape
    assert nothing.dtype == dtype
    assert same_bits(merged(records, nothing), records)
    assert same_bits(merged(nothing, records), records)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_commutes_to_the_bit(dtype):
    rng = np.random.default_rng(2)
    a, b = random_records(rng, 5000, 60).astype(dtype), random_records(rng, 5000, 60).astype(dtype)
    b[::5, 0] = a[::5, 0]
    assert same_bits(merged(a, b), merged(b, a))
    with np.errstate(invalid="ignore"):  # signalling NaN
        a, b = (records.astype(dtype) for records in special_records())
    assert same_bits(merged(a, b), merged(b, a))


def test_nan_stays_in_its_record_and_is_canonical():
    rng = np.random.default_rng(3)
    a, b = random_records(rng, 4, 2), random_records(rng, 4, 2)
    untouched = merged(a, b)
    a[1, 0] = ODD_NANS[0]
    a[2, 5] = ODD_NANS[1]
    result = merged(a, b)
    assert (bits(result[1]) == 0x7FC00000).all()
    assert bits(result[2, 5]) == 0x7FC00000
    rest = np.ones(result.shape, bool)
    rest[1] = rest[2, 5] = False
    assert (bits(result)[rest] == bits(untouched)[rest]).all()


def test_merge_by_hand():
    a = np.array([2, 1, 4], np.float32)
    b = np.array([0, 3, 3], np.float32)
    c = np.exp(-2)
    np.testing.assert_allclose(merged(a, b), [2, 1 + 3 * c, 4 + 3 * c], rtol=2e-7)


def test_factor_is_accurate_and_vanishes_below_87():
    x = -np.concatenate((np.geomspace(1e-30, 87, 20000), np.linspace(0, 87, 20000))).astype(np.float32)
    a = np.zeros((len(x), 3), np.float32)
    b = np.stack((x, np.ones_like(x), np.ones_like(x)), axis=1)
    factor = merged(a, b)[:, 1]
    np.testing.assert_allclose(factor, np.exp(x.astype(np.float64)), rtol=1.3e-7)
    b[:, 0] = np.nextafter(np.float32(-87), np.float32(-np.inf))
    assert (merged(a, b)[:, 1] == 0).all()


def test_long_chain_keeps_the_softmax():
    rng = np.random.default_rng(4)
    logits = rng.uniform(-50, 50, 3000).astype(np.float32)
    values = rng.standard_normal((3000, 4)).astype(np.float32)
    total = partial.identity((1,), 4)
    for logit, value in zip(logits, values, strict=True):
        partial.merge(total, np.concatenate(([logit, 1], value)).astype(np.float32)[None])
    weights = np.exp(logits.astype(np.float64) - logits.max())
    np.testing.assert_allclose(total[0, 2:] / total[0, 1], weights @ values / weights.sum(), atol=1e-6)
    assert total[0, 0] == logits.max()


LARGEST = 3e38
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def exact_fma(a, b, c):
    """Rational arithmetic, then one rounding to nearest even, done by comparing neighbours."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if abs(exact) > LARGEST:
        return np.float32(np.inf if exact > 0 else -np.inf)
    near = np.float32(float(exact))
    candidates = {near, np.nextafter(near, np.float32(-LARGEST)), np.nextafter(near, np.float32(LARGEST))}

    def key(value):
        return abs(Fraction(float(value)) - exact), int(value.view(np.uint32)) & 1

    return min(candidates, key=key)


TIED, TINY = 1 + 2**-12, 2**-80  # the float64 sum lies on a tie of float32, which the discarded part decides


@examples(200)
@given(finite, finite, finite)
@example(TIED, TIED, 2**-60)
@example(TIED, TIED, -(2**-60))
@example(TINY, TINY, 1 + 2**-23)
def test_emulated_fma_is_the_exact_one(a, b, c):
    with np.errstate(all="ignore"):
        got = partial._fused_multiply_add(np.float32(a), np.float32(b), np.float32(c))
    expected = exact_fma(a, b, c)
    if np.isfinite(expected):
        assert got == expected


LEFT_OVER = [(1, 2), (0, 3), (np.nan, np.nan), (np.inf, -np.inf), (-4, 5), (0, np.nan), (1e-45, 0)]


def records_of(maximum, dtype):
    """One record for each pair of `LEFT_OVER`, all of one maximum."""
    rows = [[maximum, denominator] + [numerator] * HEAD_DIM for denominator, numerator in LEFT_OVER]
    return np.array(rows, dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_maximum_of_minus_infinity_is_the_identity_whatever_is_left_over(dtype):
    left_over = records_of(-np.inf, dtype)
    out, lse = numpy_finish(left_over.reshape(1, -1, 1, HEAD_DIM + 2))
    assert (bits(out) == 0).all()
    assert (lse == -np.inf).all()
    other = random_records(np.random.default_rng(8), len(left_over), 2).astype(dtype)
    assert same_bits(merged(left_over, other), other)
    assert same_bits(merged(other, left_over), other)
    nothing = partial.identity(left_over.shape[:1], HEAD_DIM, dtype)
    for pair in ((left_over, left_over[::-1]), (left_over, nothing), (nothing, left_over)):
        assert same_bits(merged(*pair), nothing)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_infinities_finish_as_nan_and_never_as_a_silent_infinity(dtype):
    ordinary = random_records(np.random.default_rng(9), len(LEFT_OVER), 2).astype(dtype)
    ordinary[:, 1] = 1
    above = records_of(np.inf, dtype)
    nothing = records_of(-np.inf, dtype)
    cases = [above, merged(above, ordinary), merged(ordinary, above), merged(above, nothing)]
    for denominator in (np.inf, -np.inf, -1, np.nan):
        cases.append(ordinary.copy())
        cases[-1][:, 1] = denominator
    for records in cases:
        out, lse = numpy_finish(records.reshape(1, -1, 1, HEAD_DIM + 2))
        assert np.isnan(out).all()
        assert np.isnan(lse).all()
    assert not np.isposinf(numpy_finish(np.full((1, 1, 1, 3), np.finfo(dtype).max, dtype))[1]).any()


def numpy_finish(records):
    batch, heads, queries, width = records.shape
    out = np.empty((batch, queries, heads, width - 2), records.dtype)
    lse = np.empty((batch, heads, queries), records.dtype)
    partial.finish(records, out, lse)
    return out, lse


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_finish(dtype):
    rng = np.random.default_rng(6)
    records = random_records(rng, 2 * 6 * 5, 2).reshape(2, 6, 5, -1).astype(dtype)
    records[..., 1] = np.exp(rng.uniform(0, 16, records.shape[:-1]))
    partial.set_identity(records[1, 2])
    out, lse = numpy_finish(records)
    with np.errstate(all="ignore"):
        expected = np.where(records[..., 1:2] == 0, 0, records[..., 2:] / records[..., 1:2]).swapaxes(1, 2)
        expected_lse = records[..., 0].astype(np.float64) + np.log(records[..., 1].astype(np.float64))
    assert same_bits(out, expected.astype(dtype))
    np.testing.assert_allclose(lse, expected_lse, rtol=np.finfo(dtype).eps * 2, atol=np.finfo(dtype).eps * 4)
    assert (out[1, :, 2] == 0).all()
    assert (lse[1, 2] == -np.inf).all()
