"""Which beam a prefix first appeared in: a tree of all beams, written as one number for each token."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from treeattn.errors import ArgumentError

__all__ = ["array_module", "check_beams", "prefix_tree"]


def prefix_tree(beams: Any) -> Any:
    """The lowest row of the batch row that has the same tokens up to here.

    ``T[b, m, c]`` is the least k with ``beams[b, k, :c + 1] == beams[b, m, :c + 1]``. A token is a node of
    the tree where it is the first of its prefix: ``T[b, m, c] == m``. Two sorts: O(B M C log(B M C)).

    Args:
        beams: [batch, beams, tokens] integers of any width, NumPy's or CuPy's.

    Returns:
        int64 of the same shape, in the same library. A row may borrow from several rows above it, from each
        up to some column; the first column need not be common, so a batch row may be a forest.

    Raises:
        ArgumentError: no three axes, an axis of no elements, elements that are no integers.
    """
    beams = check_beams(beams)
    xp = array_module(beams)
    batch, rows, columns = beams.shape
    groups = _groups(xp, beams)
    _, first = xp.unique(groups, return_index=True)  # of each group: the lowest row, since rows ascend
    owners = (first[groups] % (batch * rows)).reshape(columns, batch, rows).transpose(1, 2, 0)
    return owners - rows * xp.arange(batch)[:, None, None]


def _groups(xp: Any, beams: Any) -> Any:
    """Numbers [tokens, batch * beams], equal where the prefixes up to this token are, within a batch row.

    In lexicographic order equal prefixes are neighbours, so a prefix is new where it differs from the one
    before it.
    """
    batch, rows, columns = beams.shape
    keys = xp.empty((columns + 1, batch * rows), xp.int64)  # the last is the first that is sorted by
    keys[-1] = xp.repeat(xp.arange(batch), rows)
    keys[:-1] = beams.reshape(-1, columns).T[::-1].astype(xp.int64)  # 64 bits as they are: equality is enough
    order = xp.lexsort(keys)
    ordered = keys[::-1][:, order]
    new = xp.ones((columns, batch * rows), bool)
    changes = xp.cumsum(ordered[:, 1:] != ordered[:, :-1], axis=0)
    new[:, 1:] = changes[1:] > 0
    groups = xp.empty((columns, batch * rows), xp.int64)
    groups[:, order] = (xp.cumsum(new.reshape(-1)) - 1).reshape(new.shape)
    return groups


def check_beams(beams: Any) -> Any:
    """`beams` as an array of integers [batch, beams, tokens]. Raises `ArgumentError`."""
    if array_module(beams) is np:
        try:
            beams = np.asarray(beams)
        except ValueError as error:
            raise ArgumentError(f"beams are no array ({error}): give rows of equal length") from None
    if beams.dtype.kind not in "iu":
        raise ArgumentError(f"beams are {beams.dtype}: token ids are integers, such as int32 or int64")
    if beams.ndim != 3 or 0 in beams.shape:
        raise ArgumentError(
            f"beams have shape {list(beams.shape)}, expected [batch, beams, tokens], each at least 1"
        )
    return beams


def array_module(array: Any) -> Any:
    """CuPy for its arrays, NumPy for everything else."""
    cupy: Any = sys.modules.get("cupy")  # whoever has an array of CuPy has imported it
    return cupy if cupy is not None and isinstance(array, cupy.ndarray) else np
