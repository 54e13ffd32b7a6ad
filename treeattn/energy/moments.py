"""Mean, variance and covariance of the values under the softmax weights, in one reduction.

They are the first two derivatives of the energy. A variance as E[v v] - E[v] E[v] is lost to rounding where
the mean is large, and the combination of variances that is not (Chan, Golub, LeVeque, "Updating Formulae and
a Pairwise Algorithm for Computing Sample Variances", 1979) is no merge of records, which is linear in their
numerators. So values are taken relative to a centre that all ranks share, after which the records are
linear and the numbers small: the plain mean of all valid values of a KV head, which the exchange that plans
the reduction brings along.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn.attention import arrays
from treeattn.collectives.schedule import Schedule
from treeattn.energy.reduction import Averages, Options, reduce
from treeattn.energy.shard import Features
from treeattn.errors import ArgumentError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["moments"]

_TOKENS = 4096  # that are widened at once


def moments(
    q: Any,
    k: Any,
    v: Any,
    *,
    comm: Intracomm | None = None,
    scheme: str | Schedule = "hierarchical",
    scale: float | None = None,
    lengths: Any = None,
    causal: bool = False,
    positions: Any = None,
    q_positions: Any = None,
    dtype: str | None = None,
    zeta: Any = None,
    covariance: bool | Sequence[int] = False,
) -> tuple[Any, ...]:
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
    options = Options(comm, scheme, scale, lengths, causal, positions, q_positions, dtype)
    statistic = _Moments(covariance)
    averages = reduce(zeta, q, k, v, options, statistic)
    return tuple(arrays.in_kind(result, q) for result in statistic.results(averages))


class _Moments:
    """Values relative to the centre, their squares, and products of pairs."""

    def __init__(self, covariance: bool | Sequence[int]) -> None:
        self._asked = covariance
        self.name = f"moments with covariance of {covariance!r}"

    def tell(self, v: Any, lengths: Any) -> tuple[Any, Any]:
        """Sums of this rank's valid values, [batch, kv_heads, head_dim], and how many there are, [batch]."""
        self._choose(v.shape[3])
        return _sums(v, lengths), lengths

    def _choose(self, v_dim: int) -> None:
        """Which dimensions have a covariance, and their pairs. Raises `ArgumentError`."""
        every = range(v_dim) if self._asked is True else ()
        self._chosen = tuple(every if isinstance(self._asked, bool) else map(operator.index, self._asked))
        if len(set(self._chosen)) < len(self._chosen) or not set(self._chosen) <= set(range(v_dim)):
            raise ArgumentError(
                f"covariance={self._asked!r:.60}: True, or distinct dimensions from 0 to {v_dim - 1}"
            )
        pairs = np.array([*itertools.combinations(range(len(self._chosen)), 2)], int).reshape(-1, 2)
        self._first, self._second = pairs.T
        self._dimensions = np.array(self._chosen, int)

    def features(self, v_dim: int, told: Sequence[Any]) -> Features:
        """2 v_dim numbers, and one for each pair."""
        self._centre = centre = _centre(told)
        first, second = self._dimensions[self._first], self._dimensions[self._second]

        def of(row: int, values: Any) -> Any:
            apart = values - centre[row][:, None]
            products = apart[..., first] * apart[..., second]
            return np.concatenate((apart, apart * apart, products), axis=-1)

        return Features(2 * v_dim + len(first), of)

    def results(self, averages: Averages) -> list[Any]:
        """Moments of the values from averages of the features."""
        dim, shape = self._centre.shape[-1], averages.shape
        apart, squares, products = np.split(averages.mean, [dim, 2 * dim], axis=-1)
        with np.errstate(all="ignore"):
            variance = np.maximum(squares - apart * apart, 0)
        centre = np.repeat(self._centre, shape.heads // shape.kv_heads, axis=1)[:, None]
        seen = (averages.lse != -np.inf).transpose(0, 2, 1)[..., None]
        mean = np.where(seen, apart + centre, 0).astype(apart.dtype)
        if self._asked is False:
            return [mean, variance]
        return [mean, variance, self._matrix(apart[..., self._dimensions], variance, products)]

    def _matrix(self, apart: Any, variance: Any, products: Any) -> Any:
        """Covariances [.., n, n] of the chosen dimensions."""
        count = len(self._dimensions)
        matrix = np.empty((*variance.shape[:-1], count, count), variance.dtype)
        with np.errstate(all="ignore"):
            products = products - apart[..., self._first] * apart[..., self._second]
        matrix[..., self._first, self._second] = matrix[..., self._second, self._first] = products
        matrix[..., range(count), range(count)] = variance[..., self._dimensions]
        return matrix


def _sums(v: Any, lengths: Any) -> Any:
    """What is not finite is left out: it has no part in a centre."""
    sums = np.zeros((v.shape[0], *v.shape[2:]))
    for row, length in enumerate(lengths):
        for begin in range(0, length, _TOKENS):
            wide = v[row, begin : min(begin + _TOKENS, length)].astype(np.float64)
            sums[row] += np.where(np.isfinite(wide), wide, 0).sum(axis=0)
    return sums


def _centre(told: Sequence[tuple[Any, Any]]) -> Any:
    """The mean of all ranks' values, [batch, kv_heads, head_dim], the same on every rank."""
    sums, counts = (functools.reduce(np.add, parts) for parts in zip(*told, strict=True))
    with np.errstate(all="ignore"):
        centre = sums / np.maximum(counts, 1)[:, None, None]
    return np.where(np.isfinite(centre), centre, 0)
