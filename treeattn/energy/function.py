"""The energy F(zeta), its gradient, its total over heads and queries, and the log-likelihood.

Source: Shyam et al., "Tree Attention", arXiv 2408.04093: the energy and its gradient in section 4, Algorithms
1 and 2, the log-likelihood in appendix C.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn import comm as comm_
from treeattn.attention import arrays
from treeattn.collectives.schedule import Schedule
from treeattn.energy.reduction import Options, reduce, tensor
from treeattn.energy.shard import Features
from treeattn.errors import ArgumentError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["gradient", "log_likelihood", "total", "value"]


class _Nothing:
    """For the energy alone, which is in a record's first two elements."""

    name = "value"

    def tell(self, v: Any, lengths: Any) -> None:
        """Nothing."""

    def features(self, v_dim: int, told: Sequence[Any]) -> Features:
        """None."""
        return Features(0, lambda row, values: values[..., :0])


class _Values(_Nothing):
    """The values themselves."""

    name = "gradient"

    def features(self, v_dim: int, told: Sequence[Any]) -> Features:
        """As they are."""
        return Features(v_dim, lambda row, values: values)


def value(
    zeta: Any,
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
) -> Any:
    """F(zeta) = log of the sum over all ranks' keys of exp(scale q.k + zeta.v). Collective; Algorithm 1.

    zeta: like q, [batch, queries, heads, head_dim], equal on every rank; None is 0, where F is the logsumexp
    of the scores. q, k, v, lengths, scale, dtype, comm: as for `treeattn.decode`, on the processor; any
    library's arrays. scheme: any that folds records and leaves them on every rank; a record has 2 elements.

    causal, positions, q_positions: what a query sees, as for `treeattn.decode`; without positions ranks hold
    consecutive tokens, and queries are the last ones.

    Returns [batch, heads, queries], float32 (float64 for float64 inputs), -inf where there is no key; in the
    container of q. Scores and sums of a shard are computed in float64 and rounded once, before the reduction.

    Raises, on every rank alike, `ArgumentError`, `ScheduleError`, `RestrictionError` or `BackendError`.
    """
    options = Options(comm, scheme, scale, lengths, causal, positions, q_positions, dtype)
    return arrays.in_kind(reduce(zeta, q, k, v, options, _Nothing()).lse, q)


def gradient(
    zeta: Any,
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
) -> Any:
    """dF/dzeta: the average of the values with weights exp(scale q.k + zeta.v). Collective; Algorithm 2.

    At zeta = 0 (or None) it is attention. Arguments and errors as for `value`; the gradient of `total` is
    the same, since each query head has a zeta of its own. Where the paper reduces the logsumexp first and
    then the sum of weighted values, a record carries both: one reduction of head_dim + 2 elements.

    Returns an array like q, float32 (float64 for float64 inputs), 0 where there is no key.
    """
    options = Options(comm, scheme, scale, lengths, causal, positions, q_positions, dtype)
    return arrays.in_kind(reduce(zeta, q, k, v, options, _Values()).mean, q)


def total(
    zeta: Any,
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
) -> Any:
    """The energy of all heads and queries together, with `causal` that of causal attention. Collective.

    Arguments and errors as for `value`. Returns [batch], float64: correctly rounded sums of `value`, hence of
    the same bits on every rank.
    """
    options = Options(comm, scheme, scale, lengths, causal, positions, q_positions, dtype)
    each = reduce(zeta, q, k, v, options, _Nothing()).lse
    return arrays.in_kind(np.array([math.fsum(row) for row in each.reshape(len(each), -1).tolist()]), q)


def log_likelihood(
    zeta: Any,
    z: Any,
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
) -> Any:
    """Gamma(zeta, z) = zeta.z - F(zeta): how likely zeta is when the value z was observed. Collective.

    The values under weights exp(scale q.k + zeta.v - F(zeta)) are an exponential family with parameter zeta
    and log-partition F, so this is its log-likelihood, up to what does not depend on zeta (after appendix
    C.2). It is concave in zeta, and stationary where z = dF/dzeta: z = attention makes zeta = 0 the maximum,
    where it is -F(0).

    z: like zeta, equal on every rank, of any floating type. Arguments and errors as for `value`. Returns
    [batch, heads, queries] as `value` does.
    """
    comm = comm_.intracomm(comm)
    with comm_.Agreement(comm):
        products = _products(zeta, z, q, dtype)
    options = Options(comm, scheme, scale, lengths, causal, positions, q_positions, dtype)
    energy = reduce(zeta, q, k, v, options, _Nothing()).lse
    return arrays.in_kind((products - energy).astype(energy.dtype), q)


def _products(zeta: Any, z: Any, q: Any, dtype: str | None) -> Any:
    """zeta.z of each query head, float64 [batch, heads, queries]; 0 without a zeta."""
    z = arrays.on_host("z", z) if arrays.device_of("z", z) == "cpu" else z
    z = tensor("z", z, dtype if z.dtype == np.uint16 else None)
    given = tensor("q", q, dtype) if zeta is None else tensor("zeta", zeta, dtype)
    if given.shape != z.shape:
        like = "q" if zeta is None else "zeta"
        raise ArgumentError(f"z has shape {list(z.shape)}, expected {list(given.shape)}, as {like} has")
    if zeta is None:
        return np.zeros((z.shape[0], z.shape[2], z.shape[1]))
    return (given.astype(np.float64) * z.astype(np.float64)).sum(axis=-1).transpose(0, 2, 1)
