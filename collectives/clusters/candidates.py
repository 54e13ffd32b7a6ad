"""What `tune` prices: schemes of the catalogue with the parameters that matter, as scheme strings."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

_RADICES = (2, 3, 4, 8, 16)
_CHUNKS = (1, 2, 4, 8)
_LEADERS = (2, 4, 8)
_MOST_FACTORISATIONS = 48  # of one number: beyond, those of ascending factors alone


def candidates(ranks: int, nodes: int, widest: int) -> Iterator[str]:
    """For so many ranks on so many nodes, of which the widest has `widest`. Some may refuse what they get."""
    yield from _flat(ranks)
    if nodes == 1 or widest == 1:
        return
    across = list(_across(nodes))
    inner = ("chain", *_trees(widest))
    yield from (f"hierarchical:inner=({tree}):outer=({outer})" for tree in inner for outer in across)
    for rail in across:
        yield f"split_rail:rail=({rail})"
        yield f"uneven_nodes:rail=({rail})"
        yield from (f"multi_leader:leaders={n}:rail=({rail})" for n in _LEADERS if n < widest)


def _flat(ranks: int) -> Iterator[str]:
    yield from ("recursive_doubling", "reduce_scatter_gather", "reduce_scatter_gather:order=near")
    yield from ("bine", "bine:form=bandwidth", "circulant", "elimination", "all_gather_trees")
    yield from ("all_gather_merge", "ring", "chain", "logp_optimal")
    yield from (f"double_binary_tree:chunks={chunks}" for chunks in _CHUNKS)
    yield from _trees(ranks)
    yield from _multiplying(ranks)


def _trees(ranks: int) -> Iterator[str]:
    for radix in _RADICES:
        if radix <= max(ranks, 2):
            yield f"k_nomial_tree:radix={radix}"
            yield f"k_ary_tree:radix={radix}"


def _across(nodes: int) -> Iterator[str]:
    """Over one rank of each node, or along a rail."""
    yield from ("recursive_doubling", "reduce_scatter_gather", "ring", "all_gather_merge", "bine")
    yield from (f"k_nomial_tree:radix={radix}" for radix in _RADICES if radix <= max(nodes, 2))
    yield from _multiplying(nodes)


def _multiplying(ranks: int) -> Iterator[str]:
    found = list(factorisations(ranks))
    if len(found) > _MOST_FACTORISATIONS:
        found = [factors for factors in found if list(factors) == sorted(factors)]
    for factors in found:
        if len(factors) > 1 and max(factors) > 2:  # the others are all_gather_merge and recursive_doubling
            yield f"recursive_multiplying:factors={'+'.join(map(str, factors))}"


def factorisations(number: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `number` as a product, in every order; the number alone is the first."""
    yield (number,)
    divisors = {d for low in range(2, isqrt(number) + 1) if number % low == 0 for d in (low, number // low)}
    for first in sorted(divisors):
        for rest in factorisations(number // first):
            yield (first, *rest)
