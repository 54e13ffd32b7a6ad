"""How token trees come about: each function gives the fields of a `TokenTree`."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from treeattn.errors import ArgumentError

if TYPE_CHECKING:
    from treeattn.token_tree.tree import TokenTree

__all__ = ["Fields", "along_paths", "integers", "pruned", "real", "sorted_by_parents", "united"]

Array = np.ndarray[Any, np.dtype[Any]]


class Fields(NamedTuple):
    """Of a `TokenTree`."""

    tokens: Array
    parents: Array
    lengths: Array
    origin: Array
    unpack_map: Array


def real(lengths: Array, nodes: int) -> Array:
    """[batch, nodes] bool: which slots are no pads."""
    return np.asarray(np.arange(nodes) < lengths[:, None])


def sorted_by_parents(tokens: Any, parents: Any, lengths: Any) -> Fields:
    """See `TokenTree.from_parents`."""
    tokens, parents = integers("tokens", tokens), integers("parents", parents)
    if tokens.ndim != 2 or tokens.shape != parents.shape or 0 in tokens.shape:
        raise ArgumentError(
            f"tokens {list(tokens.shape)} and parents {list(parents.shape)}: both are [batch, nodes]"
        )
    lengths = _lengths(lengths, *tokens.shape)
    orders = [_topological(row, parents[row, :length].tolist()) for row, length in enumerate(lengths)]
    return _kept(tokens, parents, orders, tokens.shape[1])


def _topological(row: int, parents: list[int]) -> list[int]:
    """Indices so that parents come first; of those that may come next, the lowest.

    So nodes before which all their ancestors stand keep their order.
    """
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]  # the last: of -1
    for node, parent in enumerate(parents):
        if not -1 <= parent < len(parents):
            raise ArgumentError(
                f"row {row}: node {node} has parent {parent}, a row of {len(parents)} nodes has 0 to "
                f"{len(parents) - 1}, and -1 for what follows the context"
            )
        children[parent].append(node)
    ready, order = list(children[-1]), []
    while ready:
        order.append(heapq.heappop(ready))
        for child in children[order[-1]]:
            heapq.heappush(ready, child)
    if len(order) < len(parents):
        stuck = sorted(set(range(len(parents))) - set(order))
        raise ArgumentError(f"row {row}: the parents of nodes {stuck} form a cycle: each must lead to a -1")
    return order


def along_paths(paths: Sequence[Any]) -> Fields:
    """See `TokenTree.from_paths`."""
    rows = _batch_of_paths(paths)
    found = [_trie(row, given) for row, given in enumerate(rows)]
    nodes = max(len(tokens) for tokens, _, _ in found)
    tokens, parents = np.zeros((len(rows), nodes), np.int64), np.full((len(rows), nodes), -1)
    cells = [[len(path) for path in given] for given in rows]
    unpack_map = np.full((len(rows), max(map(len, cells)), max(max(c) for c in cells)), -1)
    for row, (ids, above, slots) in enumerate(found):
        tokens[row, : len(ids)], parents[row, : len(ids)] = ids, above
        for index, path in enumerate(slots):
            unpack_map[row, index, : len(path)] = path
    lengths = np.array([len(ids) for ids, _, _ in found])
    fields = _kept(tokens, parents, [list(range(length)) for length in lengths])
    origin = _first_places(unpack_map, lengths, nodes)
    return fields._replace(origin=origin, unpack_map=unpack_map)


def _batch_of_paths(paths: Sequence[Any]) -> list[list[list[int]]]:
    """One list of paths for each row. Raises `ArgumentError`."""
    try:
        deep = [list(map(list, row)) for row in _as_rows(paths)]
    except TypeError:
        raise ArgumentError("paths are lists of token ids, in a list for each row of the batch") from None
    for row, given in enumerate(deep):
        if not any(given):
            raise ArgumentError(f"row {row} has no path with a token in it")
        if not all(isinstance(t, int | np.integer) and not isinstance(t, bool) for p in given for t in p):
            raise ArgumentError(f"row {row}: a path holds token ids, which are integers")
        if not all(-(2**63) <= t < 2**63 for p in given for t in p):
            raise ArgumentError(f"row {row}: a token id lies beyond int64")
    if not deep:
        raise ArgumentError("no paths: give a list of them for each row of the batch")
    return deep


def _as_rows(paths: Sequence[Any]) -> Sequence[Any]:
    """The paths of one row become a batch of one."""
    for path in paths:
        for token in path:
            return [paths] if isinstance(token, int | float | np.generic) else paths
    return paths


def _trie(row: int, paths: list[list[int]]) -> tuple[list[int], list[int], list[list[int]]]:
    """Tokens and parents of the distinct prefixes in the order they appear, and the slots of each path."""
    slots: dict[tuple[int, int], int] = {}
    taken = []
    for path in paths:
        here, walked = -1, []
        for token in path:
            here = slots.setdefault((here, int(token)), len(slots))
            walked.append(here)
        taken.append(walked)
    return [token for _, token in slots], [parent for parent, _ in slots], taken


def _first_places(unpack_map: Array, lengths: Array, nodes: int) -> Array:
    """The flat place at which each slot is first named; a pad's is that of node 0."""
    origin = np.zeros((len(lengths), nodes), np.int64)
    for row, flat in enumerate(unpack_map.reshape(len(lengths), -1)):
        slots, first = np.unique(flat, return_index=True)
        origin[row, slots[slots >= 0]] = first[slots >= 0]
        origin[row, lengths[row] :] = origin[row, 0]
    return origin


def united(trees: Sequence[TokenTree]) -> Fields:
    """See `TokenTree.union`."""
    batches = {tree.batch for tree in trees}
    if len(batches) > 1:
        raise ArgumentError(f"trees of {sorted(batches)} rows: only those of one batch have a union")
    rows = []
    for row in range(trees[0].batch):
        paths = [_words(tree, row, slot) for tree in trees for slot in range(tree.nodes)]
        rows.append(_trie(row, paths))
    nodes = max(1, *(len(tokens) for tokens, _, _ in rows))
    shape = len(rows), nodes
    tokens = np.zeros(shape, _common_integers(trees))
    parents, lengths = np.full(shape, -1), np.array([len(ids) for ids, _, _ in rows])
    unpack_map = np.array([[path[-1] if path else -1 for path in slots] for _, _, slots in rows])
    for row, (ids, above, _) in enumerate(rows):
        tokens[row, : len(ids)], parents[row, : len(ids)] = ids, above
    fields = _kept(tokens, parents, [list(range(length)) for length in lengths])
    return fields._replace(origin=_first_places(unpack_map, lengths, nodes), unpack_map=unpack_map)


def _common_integers(trees: Sequence[TokenTree]) -> np.dtype[Any]:
    """A type that holds the tokens of all; NumPy makes floats of uint64 beside int64.

    Raises `ArgumentError` where there is none.
    """
    found = np.result_type(*(tree.tokens.dtype for tree in trees))
    if found.kind in "iu":
        return found
    least = min(int(tree.tokens.min()) for tree in trees)
    most = max(int(tree.tokens.max()) for tree in trees)
    if least < 0 and most >= 2**63:
        raise ArgumentError(f"no type of integers holds both token {least} and token {most}")
    return np.dtype(np.int64 if most < 2**63 else np.uint64)


def _words(tree: TokenTree, row: int, slot: int) -> list[int]:
    """The tokens from the root to a slot; none for a pad."""
    return tree.tokens[row, tree.path(row, slot)].tolist() if tree.real[row, slot] else []


def pruned(tree: TokenTree, scores: Any, budget: int) -> Fields:
    """See `TokenTree.prune`."""
    try:
        scores = np.asarray(scores, np.float64)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"scores are no numbers ({error})") from None
    if scores.shape != tree.tokens.shape or np.isnan(scores[tree.real]).any():
        raise ArgumentError(
            f"scores {list(scores.shape)}: numbers {list(tree.tokens.shape)} are needed, and no NaN"
        )
    if isinstance(budget, bool) or not isinstance(budget, int | np.integer) or budget < 1:
        raise ArgumentError(f"budget {budget!r}: a number of nodes, at least 1")
    path = scores[np.arange(tree.batch)[:, None, None], tree.ancestry]
    worst = np.where(tree.ancestry >= 0, path, np.inf).min(2)
    orders = []
    for row, length in enumerate(tree.lengths):
        best = np.argsort(-worst[row, :length], kind="stable")[:budget]  # equals: the ancestor is the first
        orders.append(sorted(best.tolist()))
    return _kept(tree.tokens, tree.parents, orders)


def _kept(tokens: Array, parents: Array, orders: Sequence[Sequence[int]], nodes: int = 1) -> Fields:
    """The nodes of `orders`, for each row the slots that stay in their new order, ancestors among them.

    nodes: slots that there are at least.
    """
    batch, nodes = len(orders), max(nodes, *map(len, orders))
    origin, lengths = np.zeros((batch, nodes), np.int64), np.array(list(map(len, orders)), np.int64)
    slots = np.full((batch, parents.shape[1] + 1), -1)  # the last is the slot of -1
    for row, order in enumerate(orders):
        origin[row, : len(order)] = order
        origin[row, len(order) :] = order[0] if order else 0
        slots[row, list(order)] = np.arange(len(order))
    before = np.where(real(lengths, nodes), np.take_along_axis(parents, origin, 1), -1)
    return Fields(
        np.take_along_axis(tokens, origin, 1),
        np.take_along_axis(slots, before, 1).astype(np.int32),
        lengths,
        origin,
        slots[:, :-1].copy(),
    )


def integers(name: str, array: Any) -> Array:
    """`array` as one of integers. Raises `ArgumentError`."""
    try:
        array = np.asarray(array)
    except ValueError as error:
        raise ArgumentError(f"{name} are no array ({error}): give rows of equal length") from None
    if array.dtype.kind not in "iu":
        raise ArgumentError(f"{name} are {array.dtype}: integers are needed")
    return np.asarray(array)


def _lengths(lengths: Any, batch: int, nodes: int) -> Array:
    if lengths is None:
        return np.full(batch, nodes)
    lengths = integers("lengths", lengths)
    if lengths.shape != (batch,) or (lengths < 0).any() or (lengths > nodes).any():
        raise ArgumentError(
            f"lengths {lengths.tolist()}: one for each of {batch} rows, from 0 to {nodes} nodes"
        )
    return np.asarray(lengths, np.int64)
