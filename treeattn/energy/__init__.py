"""Attention as the gradient of an energy, over keys and values that are sharded across ranks.

F(zeta) = log of the sum over keys of exp(scale q.k + zeta.v), the energy function of Tree Attention (Shyam et
al., arXiv 2408.04093), is a logsumexp: every rank sums over its own keys, one reduction does the rest (the
paper's Algorithm 1). Its gradient at zeta = 0 is attention (Algorithm 2); its derivatives of all orders are
the cumulants of the values under the softmax weights, so the next one says how uncertain an average
attention is. Value, gradient and moments are the same reduction of records (maximum, denominator, numerators)
and differ in what the numerators average.

>>> from treeattn import energy                        # doctest: +SKIP
>>> out = energy.gradient(None, q, k, v, comm=comm)    # doctest: +SKIP
"""

from treeattn.energy.function import gradient, log_likelihood, moments, total, value

__all__ = ["gradient", "log_likelihood", "moments", "total", "value"]
