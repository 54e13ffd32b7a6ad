"""The monoid of partial attention results, defined in NumPy.

A *record* is what one query head knows after seeing some of the tokens: ``max, denominator,
numerator[head_dim]`` with ``max`` the largest scaled logit, ``denominator`` the sum of
``exp(logit - max)`` and ``numerator`` the sum of ``exp(logit - max) * v``. Arrays of records are
C-contiguous ``[batch, heads, queries, head_dim + 2]``; float32, or float64 when the inputs are.

A maximum of -inf means that nothing was seen: such a record is the identity, whatever else it holds.
A maximum of +inf, as of an infinite logit, outweighs every number and has no finite result: it
finishes as NaN, like a maximum of NaN.

Records merge by online softmax (Milakov and Gimelshein, arXiv:1805.02867), the associative
operator of tree decoding (Shyam et al., arXiv:2408.04093, section 4). The merge of float32
records here is defined to the bit: the compiled one gives the same bits on every processor, so
that ranks on unlike machines agree. Only the operand with the smaller maximum is rescaled, with a
fused multiply-add, hence the merge is commutative to the bit too. Both assume the default
floating-point environment: round to nearest, subnormal numbers kept.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

#: Elements of a record before the numerator: the maximum and the denominator.
EXTRA = 2

#: An array of NumPy, or one of a GPU that behaves as NumPy's do.
Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[Any]]

_QUIET_NAN = np.uint32(0x7FC00000).view(np.float32)

# exp(x) = 2^r * exp(f): Cody-Waite reduction and the polynomial of the Cephes library's expf.
# kernels/cpu/exponential.h has the same numbers.
_LOWEST_EXPONENT = np.float32(-87.0)
_LOG2_E = np.float32(1.44269504088896341)
_ROUND_TO_INTEGER = np.float32(12582912.0)  # 1.5 * 2^23: adding it leaves no fraction bits
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_POLYNOMIAL = tuple(
    np.float32(coefficient)
    for coefficient in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
        1.0,
        1.0,
    )
)


def identity(shape_prefix: tuple[int, ...], head_dim: int, dtype: Any = np.float32) -> Array:
    """Records of nothing seen, a new array [.., head_dim + 2] of float32 or float64: what merges with any
    record without changing it. shape_prefix: all but the last of its sizes."""
    records = np.empty((*shape_prefix, head_dim + EXTRA), dtype)
    set_identity(records)
    return records


def set_identity(records: Array) -> None:
    """Turn every record [..., head_dim + 2] into the identity, in place: max -inf, the rest 0."""
    records[...] = 0
    records[..., 0] = -np.inf


def merge(into: Array, other: Array) -> None:
    """Fold `other` into `into`, in place; both [..., head_dim + 2], float32 or float64.

    The record with the smaller maximum is rescaled by ``c = exp(smaller - larger)``: the result is
    ``fma(c, smaller record, larger record)``. Equal maxima have c = 1, a maximum of -inf makes a
    record the identity, a maximum of NaN makes the whole result NaN.
    """
    swap = other[..., :1] > into[..., :1]
    larger = np.where(swap, other, into)
    smaller = np.where(swap, into, other)
    high, low = larger[..., :1], smaller[..., :1]
    with np.errstate(all="ignore"):
        if into.dtype == np.float64:
            factor = np.where(high == low, 1.0, np.exp(low - high))
            merged = factor * smaller + larger
        else:
            factor = np.where(high == low, np.float32(1), exponential(low - high))
            merged = _fused_multiply_add(factor, smaller, larger)
        merged[..., :1] = high + merged.dtype.type(0)  # -0 and +0 are equal maxima: always +0
        np.copyto(merged[..., 1:], larger[..., 1:], where=low == -np.inf)
        np.copyto(merged[..., 1:], 0, where=high == -np.inf)
    np.copyto(merged, np.nan, where=np.isnan(high) | np.isnan(low))
    np.copyto(merged, _QUIET_NAN, where=np.isnan(merged), casting="same_kind")
    into[...] = merged


def finish(records: Array, out: Array, lse: Array) -> None:
    """Turn records [batch, heads, queries, head_dim + 2] into attention output: ``numerator / denominator``
    into out [batch, queries, heads, head_dim], ``max + ln(denominator)`` into lse [batch, heads, queries].

    0 and -inf where nothing was seen; lse is never +inf. Both have the records' dtype. For float32 the result
    is defined to the bit. Nothing was seen where the maximum is -inf, or finite with a denominator of 0. A
    maximum that is NaN or +inf and a denominator that is NaN, +inf or negative make all of the head NaN.
    """
    maximum, denominator = records[..., :1], records[..., 1:2]
    bounded = maximum < np.inf
    empty = (maximum == -np.inf) | (bounded & (denominator == 0))
    invalid = ~(bounded & (denominator >= 0) & (denominator < np.inf))
    with np.errstate(all="ignore"):
        quotient = records[..., EXTRA:] / denominator
        logarithm = _logarithm(denominator.astype(np.float64))
        total = maximum.astype(np.float64) + logarithm
    np.copyto(quotient, _QUIET_NAN, where=invalid | np.isnan(quotient), casting="same_kind")
    np.copyto(quotient, 0, where=empty)
    np.copyto(total, np.nan, where=invalid)
    np.copyto(total, -np.inf, where=empty)
    out[...] = np.swapaxes(quotient, 1, 2)
    lse[...] = total[..., 0]


def exponential(x: Array) -> Array:
    """exp of float32 values <= 0, to the bit what kernels/cpu/exponential.h computes."""
    bounded = np.fmax(x, _LOWEST_EXPONENT)
    shifted = _fused_multiply_add(bounded, _LOG2_E, _ROUND_TO_INTEGER)
    power = shifted - _ROUND_TO_INTEGER
    fraction = _fused_multiply_add(power, -_LN2_HIGH, bounded)
    fraction = _fused_multiply_add(power, -_LN2_LOW, fraction)
    value = np.broadcast_to(_POLYNOMIAL[0], x.shape)
    for coefficient in _POLYNOMIAL[1:]:
        value = _fused_multiply_add(value, fraction, coefficient)
    scaled = np.ldexp(value, power.astype(np.int32))
    return np.where(x < _LOWEST_EXPONENT, np.float32(0), scaled)


def _fused_multiply_add(a: Any, b: Any, c: Any) -> Array:
    """a * b + c of float32 values with one rounding, as IEEE 754 defines it.

    The product is exact in float64. The sum is rounded to odd there (Boldo and Melquiond, 2008):
    with 29 bits to spare, rounding it once more to float32 is then the correct rounding.
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, np.float64)
    total = np.asarray(product + addend)
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    # One step towards the discarded part: away from zero when both have one sign.
    step = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.asarray(np.where(inexact, bits + step, bits))
    return np.asarray(odd.view(np.float64).astype(np.float32))


def _logarithm(x: Array) -> Array:
    """Natural logarithm of positive float64 values from basic operations: the same bits everywhere."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.70710678118654752
    mantissa = np.where(small, mantissa + mantissa, mantissa)
    exponent = np.where(small, exponent - 1, exponent)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)  # ln(m) = 2 atanh((m - 1) / (m + 1))
    square = ratio * ratio
    series = np.full_like(square, 1.0 / 21.0)
    for odd in range(19, 0, -2):
        series = series * square + 1.0 / odd
    return np.asarray(exponent * 0.6931471805599453 + (ratio + ratio) * series)
