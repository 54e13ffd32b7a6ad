"""Reduce-scatter and all-gather on a circulant graph: least rounds for the least bytes, whatever p is.

The reduce-scatter is `head_scatter`: with h chunks still to hand on, at first h = p, each rank sends the
upper half of them to the rank ceil(h/2) ahead. The same messages in reverse, as copies, gather the complete
chunks. No rank folds into another first, as in `reduce_scatter_gather`: an odd p costs no round and no byte
more.

2 ceil(log2 p) rounds; every rank sends and receives 2 (p-1) chunks of n/p bytes. A range of chunks that
wraps past the last one travels as two messages: 2 (p-1) (ceil(log2 p) + 1) of them in all.

Cost: 2 ceil(log2 p) alpha + 2 n (p-1)/p beta

Source: Traeff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", arXiv:2410.14234 (2024).
"""

from __future__ import annotations

from treeattn.collectives.combinators import reversed_as_copies, then
from treeattn.collectives.schedule import Schedule
from treeattn.collectives.schemes.head_scatter import head_scatter


def circulant(size: int) -> Schedule:
    """Reduce-scatter, then all-gather, each in ceil(log2 p) rounds for any number of ranks."""
    scatter = head_scatter(size).rounds
    return Schedule("circulant", size, size, then(scatter, reversed_as_copies(scatter)))
