"""Attention records whose bits depend on the set of tokens alone, defined in NumPy.

A logit, its weight ``m * 2**e`` and the products of the weight with a value are functions of one token. Each
of these addends x is cut by itself, at fixed places of the binary number line that lie `STEP` bits apart,
into whole numbers s, s', .. of which each is the nearest to what is left:
``x = s * 2**(STEP * top) + s' * 2**(STEP * (top - 1)) + ..``. A record keeps their
sums in two such *bins*, `top` and the one below; which one is the top follows from the largest exponents that
were seen. Whole numbers add exactly, hence a record is a function of the set of its tokens, and the merge is
associative and commutative on all words.

Records are int64 [.., 2 v_dim + 3], C-contiguous: two int32 exponents (of weights, of values) in one word;
the denominator, upper and lower; the numerator, all upper and then all lower. Every other implementation
equals this one to the bit. The default floating-point environment is assumed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn import partial
from treeattn.partial import Array

#: Bits from a bin to the next, and words of a record before the numerator's.
STEP, EXTRA = 41, 3
#: Tokens up to which no sum overflows: a slice is at most 2**40, and that where a tie leaves it.
MOST_TOKENS = (1 << 23) - 1
# Exponents of nothing, and of what has no finite result: the maximum absorbs them and is absorbed by them.
_EMPTY, _SPOILED = -(1 << 28), 1 << 28
_LARGEST_LOGIT = 1 << 20
#: Tokens of a block, where blocks are summed in float32; below 2**-100 of its largest weight there is none.
BLOCK = 32
_BLOCK_BITS, _LOWEST_WEIGHT = 5, -100
_LANES = 16
_fma = partial._fused_multiply_add


def identity(shape_prefix: tuple[int, ...], v_dim: int) -> Array:
    """Records of no token, int64 [*shape_prefix, 2 v_dim + 3]: what merges with any without changing it."""
    records = np.empty((*shape_prefix, 2 * v_dim + EXTRA), np.int64)
    set_identity(records)
    return records


def set_identity(records: Array) -> None:
    """Turn every record into the identity, in place."""
    records[...] = 0
    _exponents(records)[...] = _EMPTY


def _exponents(records: Array) -> Array:
    """int32 [.., 2], a view: of weights and of values."""
    return records[..., :1].view(np.int32)


def _tops(exponents: Array) -> Array:
    """The upper bins of denominator and numerator: int64 [.., 2]. A weight is below 2**(weight + 1), a
    product below 2**(weight + value + 2)."""
    weight, value = exponents[..., 0].astype(np.int64), exponents[..., 1].astype(np.int64)
    return np.stack((weight + 1, weight + value + 2), axis=-1) // STEP


def record(
    q: Array,
    k: Array,
    v: Array,
    v_scale: float = 1.0,
    *,
    softcap: float = 0,
    penalty: Array | None = None,
    blocks: Array | None = None,
) -> Array:
    """The record of one query head and the tokens that it sees: int64 [2 v_dim + 3].

    q: float32 [head_dim], times the scale. k, v: float32 [tokens, head_dim and v_dim]; a value times v_scale
    has at most 29 significant bits. penalty: float64 [tokens], what ALiBi takes from each logit. blocks:
    [tokens], the number of the block of each, whose tokens are summed in their order; all else may come in
    any.
    """
    result, exponents = identity((), v.shape[1]), np.array([_EMPTY, _EMPTY])
    if not len(k):
        return result
    with np.errstate(all="ignore"):
        logits = _logits(_scores(q, k), softcap, penalty)
        if blocks is None:
            m, e = _weights(logits)
            values = v.astype(np.float64) * v_scale
            products = m[:, None] * values  # exact: 24 and at most 29 bits
            e[logits == -np.inf] = _EMPTY
            e[~(logits < np.inf)] = _SPOILED
            exponents[:] = e.max(), _value_exponent(values)
        else:
            m, e, products = _sums_of_blocks(logits, v, blocks)
            products *= v_scale
            exponents[:] = e.max(), _value_exponent(products)
            sound = (exponents > _EMPTY) & (exponents < _SPOILED)
            exponents += np.where(sound, (_BLOCK_BITS, -_BLOCK_BITS), 0)
        _exponents(result)[...] = exponents
        seen, (weight_top, product_top) = e > _EMPTY, _tops(exponents)
        if seen.any() and exponents[0] < _SPOILED:
            result[1], result[2] = (part.sum() for part in _slices(m[seen], e[seen], weight_top))
            if exponents[1] < _SPOILED:
                slices = _slices(products[seen], e[seen, None], product_top)
                result[EXTRA:] = np.concatenate([part.sum(axis=0) for part in slices])
    return result


def _sums_of_blocks(logits: Array, v: Array, blocks: Array) -> tuple[Array, Array, Array]:
    """The sum of weights of each block, and [.., v_dim] of weighted values, in units of 2**e: both summed in
    float32 in the order of tokens, by multiply-adds from 0. e: the largest of its tokens."""
    totals, exponents, sums = [], [], []
    for block in np.unique(blocks):
        x, most = logits[blocks == block], _EMPTY
        weights = np.zeros(len(x), np.float32)
        if not (x < np.inf).all():
            most = _SPOILED
        elif (seen := x > -np.inf).any():
            m, e = _weights(x[seen])
            most = int(e.max())
            weights[seen] = np.where(e - most < _LOWEST_WEIGHT, 0, np.ldexp(m, e - most))
        total, added = np.float32(0), np.asarray(np.zeros(v.shape[1], np.float32))
        for weight, values in zip(weights, v[blocks == block], strict=True):
            total, added = total + weight, _fma(weight, values, added)
        totals.append(total)
        exponents.append(most)
        sums.append(added)
    return np.array(totals, np.float64), np.array(exponents), np.array(sums, np.float64)


def record_of_sink(logit: float, v_dim: int) -> Array:
    """The record of a key of this logit whose value is 0."""
    result = identity((), v_dim)
    if logit > -np.inf:
        m, e = _weights(np.array([logit], np.float32))
        _exponents(result)[...] = e[0], -127
        result[1], result[2] = (part[0] for part in _slices(m, e, _tops(_exponents(result))[0]))
    return result


def _scores(q: Array, k: Array) -> Array:
    """Products of q with each key, float32: element d goes to lane d % 16 by one multiply-add, in ascending
    order from 0; then lanes are folded 8, 4, 2 and 1 apart."""
    lanes = np.zeros((len(k), _LANES), np.float32)
    for d in range(0, k.shape[1], _LANES):
        part = slice(d, min(d + _LANES, k.shape[1]))
        own = slice(0, part.stop - d)
        lanes[:, own] = _fma(k[:, part], q[part], lanes[:, own])
    for apart in (8, 4, 2, 1):
        lanes = lanes[:, :apart] + lanes[:, apart : 2 * apart]
    return lanes[:, 0]


def _logits(scores: Array, softcap: float, penalty: Array | None) -> Array:
    """Scores as they are, float32; or in float64 what a soft cap and ALiBi make of them."""
    if not softcap and penalty is None:
        return scores
    logits = scores.astype(np.float64)
    if softcap:
        cap = np.float64(np.float32(softcap))
        small = _small_exponential(np.abs(logits / cap) * -2.0)
        logits = np.copysign(cap * ((1.0 - small) / (1.0 + small)), logits)
    return logits if penalty is None else logits - penalty


# exp of float64 from basic operations.
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 6.93147180369123816490e-01, 1.90821492927058770002e-10
_FACTORIALS = tuple(1.0 / float(np.prod(np.arange(1, n + 1, dtype=np.float64))) for n in range(13, -1, -1))


def _reduced(x: Array) -> tuple[Array, Array]:
    """x = power * ln 2 + fraction."""
    power = np.rint(x * _LOG2_E)
    return power, (x - power * _LN2_HIGH) - power * _LN2_LOW


def _small_exponential(x: Array) -> Array:
    """exp of float64 numbers <= 0, in absolute terms."""
    power, fraction = _reduced(np.maximum(x, -700.0))
    value = np.full_like(x, _FACTORIALS[0])
    for factor in _FACTORIALS[1:]:
        value = value * fraction + factor
    return np.ldexp(value, power.astype(np.int64))


def _weights(logits: Array) -> tuple[Array, Array]:
    """exp(logit) = m * 2**e: m float64 of 24 bits, in 0.7 .. 1.42; e int64. The polynomial is that of
    `partial.exponential`."""
    x = np.clip(logits, logits.dtype.type(-_LARGEST_LOGIT), logits.dtype.type(_LARGEST_LOGIT))
    if x.dtype == np.float64:
        power, rest = _reduced(x)
        fraction = rest.astype(np.float32)
    else:
        power = _fma(x, partial._LOG2_E, partial._ROUND_TO_INTEGER) - partial._ROUND_TO_INTEGER
        fraction = _fma(power, -partial._LN2_LOW, _fma(power, -partial._LN2_HIGH, x))
    m = np.broadcast_to(partial._POLYNOMIAL[0], x.shape)
    for coefficient in partial._POLYNOMIAL[1:]:
        m = _fma(m, fraction, coefficient)
    return m.astype(np.float64), power.astype(np.int64)


def _value_exponent(v: Array) -> int:
    """The largest magnitude is in 2**exponent .. 2**(exponent + 1); -127 for all that is below 2**-126."""
    largest = np.abs(v).max()
    if not largest < np.inf:
        return _SPOILED
    return max(int(np.frexp(largest)[1]) - 1, -127) if largest else -127


def _slices(x: Array, unit: Array, top: Any) -> tuple[Array, Array]:
    """x * 2**unit in the bins `top` and `top` - 1, to the nearest whole number, ties to even."""
    x = np.ldexp(x, np.clip(unit - STEP * top, -1000, 900))
    upper = np.rint(x)
    return upper.astype(np.int64), np.rint((x - upper) * 2.0**STEP).astype(np.int64)


def merge(into: Array, other: Array) -> None:
    """Fold `other` into `into`, in place; both [.., 2 v_dim + 3]. Associative and commutative on all words:
    maxima, shifts and sums modulo 2**64."""
    both = np.maximum(_exponents(into), _exponents(other))
    total = _raised(into, both) + _raised(other, both)
    _exponents(total)[...] = both
    into[...] = total


def _raised(records: Array, exponents: Array) -> Array:
    """Records as their tokens would make them under exponents that are at least their own."""
    rise = _tops(exponents) - _tops(_exponents(records))
    raised = np.empty_like(records)
    v_dim = (records.shape[-1] - EXTRA) // 2
    for bins, first, size in ((rise[..., :1], 1, 1), (rise[..., 1:], EXTRA, v_dim)):
        upper, lower = records[..., first : first + size], records[..., first + size : first + 2 * size]
        raised[..., first : first + size] = np.where(bins == 0, upper, 0)
        raised[..., first + size : first + 2 * size] = np.select([bins == 0, bins == 1], [lower, upper], 0)
    return raised


def finish(records: Array, out: Array, lse: Array) -> None:
    """Records [batch, heads, queries, 2 v_dim + 3] into out [batch, queries, heads, v_dim] and lse [batch,
    heads, queries], float32, as `partial.finish` writes them. No number in them but NaN is of a head in which
    something was infinite or NaN."""
    exponents, tops = _exponents(records), _tops(_exponents(records))
    v_dim = (records.shape[-1] - EXTRA) // 2
    denominator = _number(records[..., 1:2], records[..., 2:3])
    numerator = _number(records[..., EXTRA : EXTRA + v_dim], records[..., EXTRA + v_dim :])
    empty = exponents[..., :1] <= _EMPTY
    spoiled = (exponents[..., :1] >= _SPOILED) | ~(denominator > 0)
    with np.errstate(all="ignore"):
        apart = (STEP * (tops[..., 1:] - tops[..., :1])).clip(-3000, 3000)
        quotient = np.ldexp(numerator / denominator, apart).astype(np.float32)
        unit = (STEP * (tops[..., :1] - 1)).astype(np.float64)
        total = unit * 0.6931471805599453 + partial._logarithm(denominator)
    np.copyto(quotient, partial._QUIET_NAN, where=spoiled | (exponents[..., 1:] >= _SPOILED))
    np.copyto(quotient, 0, where=empty)
    np.copyto(total, np.nan, where=spoiled)
    np.copyto(total, -np.inf, where=empty)
    out[...] = np.swapaxes(quotient, 1, 2)
    lse[...] = total[..., 0]


def _number(upper: Array, lower: Array) -> Array:
    """What two bins hold in units of the lower one, rounded to float64."""
    return upper.astype(np.float64) * 2.0**STEP + lower.astype(np.float64)
