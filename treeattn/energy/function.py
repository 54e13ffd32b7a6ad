"""The energy F(zeta), its gradient, its total, the log-likelihood, and the moments of the values.

Source: Shyam et al., "Tree Attention", arXiv 2408.04093: the energy and its gradient in section 4, Algorithms
1 and 2, the log-likelihood in appendix C.2. The moments are the first two derivatives of the energy.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn.attention import arrays
from treeattn.attention.arrays import AnyArray
from treeattn.energy.average import Features, Options, average, tensor
from treeattn.errors import ArgumentError
from treeattn.partial import Array

if TYPE_CHECKING:
    from typing_extensions import Unpack

_TOKENS = 4096  # that are widened at once


def value(
    zeta: AnyArray, q: AnyArray, k: AnyArray, v: AnyArray | None = None, **options: Unpack[Options]
) -> Array:
    """F(zeta) = log of the sum over all ranks' keys of exp(scale q.k + zeta.v). Collective; Algorithm 1.

    Parameters
    ----------
    zeta : [batch, queries, heads, head_dim] or None
        Like q, equal on every rank; None is 0, where F is the logsumexp of the scores.
    q, k, v
        As for `treeattn.decode`, on the CPU; k may be a `treeattn.Shard` with positions.

    Other Parameters
    ----------------
    comm, scale, lengths, q_positions
        As for `treeattn.decode`.
    scheme : str, Schedule or Reduction
        Any that folds records and leaves them on every rank; a record has 2 elements.
    rules : Rules, optional
        Which keys a query sees: causal, a window, leading tokens.

    Returns
    -------
    [batch, heads, queries]
        float32 (float64 for float64 inputs), -inf where there is no key; in the container of q. Scores and
        sums of a shard are computed in float64 and rounded once, before the reduction.

    Raises
    ------
    ArgumentError, ScheduleError, RestrictionError, BackendError
        The same on every rank.

    Examples
    --------
    >>> q, k = np.ones((1, 1, 4, 8)), np.zeros((1, 3, 2, 8))
    >>> treeattn.energy.value(None, q, k, k)[0, 0].round(4).tolist()  # ln 3
    [1.0986]
    """
    return arrays.in_kind(average("value", _nothing, zeta, q, k, v, **options).lse, q)


def gradient(
    zeta: AnyArray, q: AnyArray, k: AnyArray, v: AnyArray | None = None, **options: Unpack[Options]
) -> Array:
    """dF/dzeta: the average of the values with weights exp(scale q.k + zeta.v). Collective; Algorithm 2.

    At zeta = 0 (or None) it is attention. Arguments and errors as for `value`; the gradient of `total` is
    the same, since each query head has a zeta of its own. Where the paper reduces the logsumexp first and
    then the sum of weighted values, a record carries both: one reduction of head_dim + 2 elements.

    Returns an array like q, float32 (float64 for float64 inputs), 0 where there is no key.

    >>> q, k = np.ones((1, 1, 4, 8)), np.zeros((1, 3, 2, 8))
    >>> treeattn.energy.gradient(None, q, k, k + 2.0)[0, 0, 0, :3].round(4).tolist()
    [2.0, 2.0, 2.0]
    """
    return arrays.in_kind(average("gradient", _values, zeta, q, k, v, **options).mean, q)


def total(
    zeta: AnyArray, q: AnyArray, k: AnyArray, v: AnyArray | None = None, **options: Unpack[Options]
) -> Array:
    """The energy of all heads and queries together, with causal `rules` that of causal attention. Collective.

    Arguments and errors as for `value`. Returns [batch], float64: correctly rounded sums of `value`, hence of
    the same bits on every rank.

    >>> q, k = np.ones((1, 1, 4, 8)), np.zeros((1, 3, 2, 8))
    >>> treeattn.energy.total(None, q, k, k).round(4).tolist()  # 4 heads: 4 ln 3
    [4.3944]
    """
    each = average("value", _nothing, zeta, q, k, v, **options).lse
    return arrays.in_kind(np.array([math.fsum(row) for row in each.reshape(len(each), -1).tolist()]), q)


def log_likelihood(
    zeta: AnyArray,
    z: AnyArray,
    q: AnyArray,
    k: AnyArray,
    v: AnyArray | None = None,
    **options: Unpack[Options],
) -> Array:
    """Gamma(zeta, z) = zeta.z - F(zeta): how likely zeta is when the value z was observed. Collective.

    The values under weights exp(scale q.k + zeta.v - F(zeta)) are an exponential family with parameter zeta
    and log-partition F, so this is its log-likelihood, up to what does not depend on zeta (after appendix
    C.2). It is concave in zeta, and stationary where z = dF/dzeta: z = attention makes zeta = 0 the maximum,
    where it is -F(0).

    z: like zeta, equal on every rank, of any floating type. Arguments and errors as for `value`. Returns
    [batch, heads, queries] as `value` does.

    >>> q, k = np.ones((1, 1, 4, 8)), np.zeros((1, 3, 2, 8))
    >>> treeattn.energy.log_likelihood(None, q, q, k, k)[0, 0].round(4).tolist()
    [-1.0986]
    """

    def products(query: Array, values: Array, lengths: Array) -> Array:
        """zeta.z of each query head, float64 [batch, heads, queries]."""
        shape = (*query.shape[:3], values.shape[3])
        observed = tensor("z", z, shape).astype(np.float64)
        tilt = np.zeros(shape) if zeta is None else tensor("zeta", zeta, shape).astype(np.float64)
        return np.asarray(np.einsum("bqhd,bqhd->bhq", tilt, observed))

    averages = average("log_likelihood", _nothing, zeta, q, k, v, products, **options)
    return arrays.in_kind((averages.summaries[0] - averages.lse).astype(averages.lse.dtype), q)


def moments(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray | None = None,
    *,
    zeta: AnyArray | None = None,
    covariance: bool | Sequence[int] = False,
    **options: Unpack[Options],
) -> tuple[Array, ...]:
    """(mean, variance) of the values over all ranks' keys, with the weights of attention. Collective.

    The mean is attention; the variance, of each of its elements, says how far the values it averages lie
    apart: 0 where one key has all the weight. With `zeta` the weights are those of `treeattn.energy.value`.
    covariance: True, or some distinct dimensions of 0..head_dim-1: then there is a third result [batch,
    queries, heads, n, n], the covariance of those n. Other arguments and errors as for `value`.

    Results are like q, float32 (float64 for float64 inputs), 0 where there is no key. With c the plain mean
    of the KV head's valid values and m merges on the way, a float32 variance is off by at most
    (10 + 2 m) 2^-24 (variance + (mean - c)^2): relative to the spread of the values, however far they lie
    from 0. In float64 that is 1e-15 in place of 2^-24, since the sums within a shard are rounded too. It is
    never negative; the matrix of a covariance may have eigenvalues below 0, by as little.

    One reduction of records of 2 + 2 head_dim elements, and of n (n - 1) / 2 more for a covariance.

    >>> q, k = np.ones((1, 1, 4, 8)), np.zeros((1, 3, 2, 8))
    >>> v = k + np.arange(3.0)[:, None, None]  # 0, 1 and 2, of equal weight
    >>> mean, variance = treeattn.energy.moments(q, k, v)
    >>> mean[0, 0, 0, 0].round(4), variance[0, 0, 0, 0].round(4)
    (np.float64(1.0), np.float64(0.6667))
    """

    def summary(query: Array, values: Array, lengths: Array) -> tuple[Array, Array, Array]:
        return _sums(values, lengths), lengths, _dimensions(covariance, values.shape[3])

    name = f"moments with covariance of {covariance!r}"
    averages = average(name, _CentralProducts, zeta, q, k, v, summary, **options)
    about: _CentralProducts = averages.features
    centre, chosen, (first, second) = about.centre, about.chosen, about.pairs
    dim, heads = centre.shape[-1], averages.mean.shape[2]
    apart, squares, products = np.split(averages.mean, [dim, 2 * dim], axis=-1)
    with np.errstate(all="ignore"):
        variance = np.maximum(squares - apart * apart, 0)
        products = products - apart[..., chosen[first]] * apart[..., chosen[second]]
    there = (averages.lse != -np.inf).transpose(0, 2, 1)[..., None]
    mean = apart + np.repeat(centre, heads // centre.shape[1], axis=1)[:, None]
    results = [np.where(there, mean, 0).astype(apart.dtype), variance]
    if covariance is not False:
        matrix = np.empty((*variance.shape[:-1], len(chosen), len(chosen)), variance.dtype)
        matrix[..., first, second] = matrix[..., second, first] = products
        matrix[..., range(len(chosen)), range(len(chosen))] = variance[..., chosen]
        results.append(matrix)
    return tuple(arrays.in_kind(result, q) for result in results)


def _nothing(summaries: Sequence[Any]) -> Features:
    """Where the sum of the weights is all that is wanted."""
    return lambda row, values: values[..., :0]


def _values(summaries: Sequence[Any]) -> Features:
    return lambda row, values: values


class _CentralProducts:
    """Values relative to a centre, their squares, and products of pairs of the chosen dimensions.

    A variance as E[v v] - E[v] E[v] is lost to rounding where the mean is large, and the combination of
    variances that is not (Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances", 1979) is no merge of records, which is linear in their numerators. So values are taken
    relative to a centre that all ranks share, after which records are linear and the numbers small: the plain
    mean of all valid values of a KV head, of which the exchange that plans the reduction brings the sums.

    centre: [batch, kv_heads, head_dim], the same on every rank. chosen: the dimensions that have a
    covariance; pairs: both indices into these of every pair of them.
    """

    def __init__(self, summaries: Sequence[tuple[Array, Array, Array]]) -> None:
        sums, counts, (self.chosen, *_) = zip(*summaries, strict=True)
        with np.errstate(all="ignore"):
            centre = sum(sums) / np.maximum(sum(counts), 1)[:, None, None]
        self.centre: Array = np.where(np.isfinite(centre), centre, 0)
        self.pairs = np.triu_indices(len(self.chosen), 1)

    def __call__(self, row: int, values: Array) -> Array:
        apart = values - self.centre[row][:, None]
        first, second = (self.chosen[one] for one in self.pairs)
        return np.concatenate((apart, apart * apart, apart[..., first] * apart[..., second]), axis=-1)


def _dimensions(covariance: bool | Sequence[int], v_dim: int) -> Array:
    """Which dimensions have a covariance. Raises `ArgumentError`."""
    every = range(v_dim) if covariance is True else ()
    chosen = tuple(every if isinstance(covariance, bool) else map(operator.index, covariance))
    if len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(v_dim)):
        raise ArgumentError(
            f"covariance={covariance!r:.60}: True, or distinct dimensions from 0 to {v_dim - 1}"
        )
    return np.array(chosen, int)


def _sums(v: Array, lengths: Array) -> Array:
    """Sums over the valid tokens, without what is not finite: it has no part in a centre."""
    sums = np.zeros((v.shape[0], *v.shape[2:]))
    for row, length in enumerate(lengths):
        for begin in range(0, length, _TOKENS):
            wide = v[row, begin : min(begin + _TOKENS, length)].astype(np.float64)
            sums[row] += np.where(np.isfinite(wide), wide, 0).sum(axis=0)
    return sums
