"""The energy F(zeta), its gradient, its total, the log-likelihood, and the moments of the values.

Source: Shyam et al., "Tree Attention", arXiv 2408.04093: the energy and its gradient in section 4, Algorithms
1 and 2, the log-likelihood in appendix C.2. The moments are the first two derivatives of the energy.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from treeattn.attention import arrays
from treeattn.attention.arrays import AnyArray
from treeattn.energy.reduction import Averages, Features, Options, Statistic, reduce, tensor
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
        On every rank alike.
    """
    return arrays.in_kind(reduce(Statistic(), zeta, q, k, v, **options).lse, q)


def gradient(
    zeta: AnyArray, q: AnyArray, k: AnyArray, v: AnyArray | None = None, **options: Unpack[Options]
) -> Array:
    """dF/dzeta: the average of the values with weights exp(scale q.k + zeta.v). Collective; Algorithm 2.

    At zeta = 0 (or None) it is attention. Arguments and errors as for `value`; the gradient of `total` is
    the same, since each query head has a zeta of its own. Where the paper reduces the logsumexp first and
    then the sum of weighted values, a record carries both: one reduction of head_dim + 2 elements.

    Returns an array like q, float32 (float64 for float64 inputs), 0 where there is no key.
    """
    return arrays.in_kind(reduce(_Values(), zeta, q, k, v, **options).mean, q)


def total(
    zeta: AnyArray, q: AnyArray, k: AnyArray, v: AnyArray | None = None, **options: Unpack[Options]
) -> Array:
    """The energy of all heads and queries together, with causal `rules` that of causal attention. Collective.

    Arguments and errors as for `value`. Returns [batch], float64: correctly rounded sums of `value`, hence of
    the same bits on every rank.
    """
    each = reduce(Statistic(), zeta, q, k, v, **options).lse
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
    """
    statistic = _Products(zeta, z)
    energy = reduce(statistic, zeta, q, k, v, **options).lse
    return arrays.in_kind((statistic.products - energy).astype(energy.dtype), q)


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
    """
    statistic = _Moments(covariance)
    averages = reduce(statistic, zeta, q, k, v, **options)
    return tuple(arrays.in_kind(result, q) for result in statistic.results(averages))


class _Values(Statistic):
    """The values themselves."""

    name = "gradient"

    def features(self, v_dim: int, shared: Sequence[object]) -> Features:
        return Features(v_dim, lambda row, values: values)


class _Products(Statistic):
    """Nothing of the values, and beside it zeta.z of each query head, float64 [batch, heads, queries]."""

    name = "log_likelihood"

    def __init__(self, zeta: AnyArray, z: AnyArray) -> None:
        self._zeta, self._z = zeta, z

    def share(self, q: AnyArray, v: Array, lengths: Array) -> None:
        z = tensor("z", self._z)
        given = q if self._zeta is None else tensor("zeta", self._zeta)
        if given.shape != z.shape:
            like = "q" if self._zeta is None else "zeta"
            raise ArgumentError(f"z has shape {list(z.shape)}, expected {list(given.shape)}, as {like} has")
        wide = np.zeros(z.shape) if self._zeta is None else given.astype(np.float64) * z.astype(np.float64)
        self.products = wide.sum(axis=-1).transpose(0, 2, 1)


class _Moments(Statistic):
    """Values relative to a centre, their squares, and products of pairs.

    A variance as E[v v] - E[v] E[v] is lost to rounding where the mean is large, and the combination of
    variances that is not (Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances", 1979) is no merge of records, which is linear in their numerators. So values are taken
    relative to a centre that all ranks share, after which records are linear and the numbers small: the plain
    mean of all valid values of a KV head, which the exchange that plans the reduction brings along.
    """

    def __init__(self, covariance: bool | Sequence[int]) -> None:
        self._covariance, self.name = covariance, f"moments with covariance of {covariance!r}"

    def share(self, q: AnyArray, v: Array, lengths: Array) -> tuple[Array, Array]:
        """Sums of this rank's valid values, [batch, kv_heads, head_dim], and how many there are, [batch]."""
        self._chosen = _dimensions(self._covariance, v.shape[3])
        pairs = np.array([*itertools.combinations(range(len(self._chosen)), 2)], int).reshape(-1, 2)
        self._first, self._second = pairs.T
        return _sums(v, lengths), lengths

    def features(self, v_dim: int, shared: Sequence[tuple[Array, Array]]) -> Features:
        """2 v_dim numbers, and one for each pair."""
        self._centre = centre = _mean_of_all(shared)
        first, second = self._chosen[self._first], self._chosen[self._second]

        def of(row: int, values: Array) -> Array:
            apart = values - centre[row][:, None]
            return np.concatenate((apart, apart * apart, apart[..., first] * apart[..., second]), axis=-1)

        return Features(2 * v_dim + len(first), of)

    def results(self, averages: Averages) -> list[Array]:
        """Moments of the values from averages of the features."""
        dim, shape = self._centre.shape[-1], averages.shape
        apart, squares, products = np.split(averages.mean, [dim, 2 * dim], axis=-1)
        with np.errstate(all="ignore"):
            variance = np.maximum(squares - apart * apart, 0)
        centre = np.repeat(self._centre, shape.heads // shape.kv_heads, axis=1)[:, None]
        seen = (averages.lse != -np.inf).transpose(0, 2, 1)[..., None]
        mean = np.where(seen, apart + centre, 0).astype(apart.dtype)
        if self._covariance is False:
            return [mean, variance]
        return [mean, variance, self._matrix(apart[..., self._chosen], variance, products)]

    def _matrix(self, apart: Array, variance: Array, products: Array) -> Array:
        """Covariances [.., n, n] of the chosen dimensions."""
        count = len(self._chosen)
        matrix = np.empty((*variance.shape[:-1], count, count), variance.dtype)
        with np.errstate(all="ignore"):
            products = products - apart[..., self._first] * apart[..., self._second]
        matrix[..., self._first, self._second] = matrix[..., self._second, self._first] = products
        matrix[..., range(count), range(count)] = variance[..., self._chosen]
        return matrix


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


def _mean_of_all(shared: Sequence[tuple[Array, Array]]) -> Array:
    """The mean of all ranks' values, [batch, kv_heads, head_dim], the same on every rank."""
    sums, counts = (functools.reduce(np.add, parts) for parts in zip(*shared, strict=True))
    with np.errstate(all="ignore"):
        centre = sums / np.maximum(counts, 1)[:, None, None]
    return np.where(np.isfinite(centre), centre, 0)
