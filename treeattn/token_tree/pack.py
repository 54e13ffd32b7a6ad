"""Packs beams into a prefix tree in which each prefix is one node, and unpacks.

Works on arrays of NumPy and of CuPy.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from treeattn.errors import ArgumentError
from treeattn.partial import Array


class Packed(NamedTuple):
    """What `pack` makes of beams [B, M, C]; L is the most distinct prefixes of a batch row.

    Nodes are in the order in which beams, read row by row, show them first, so a parent comes before its
    children. Slots from ``lengths[b]`` on are pads: the row's own node 0 again, which no node sees.

    packed_beam: [B, L] tokens, of the type of the beams.
    attention_mask: [B, L, L] bool, [query, key]: a node sees its ancestors and itself.
    position_offsets: [B, L] int64, the depth from 0, which siblings share. A node's position is that of the
    first token after the context plus this.
    unpack_map: [B, M, C] int64, the slot of every token of the beams.
    lengths: [B] int64, the nodes of each batch row.
    packed_token_indices: [B, L] int64, m * C + c of the token that each node came from.
    """

    packed_beam: Array
    attention_mask: Array
    position_offsets: Array
    unpack_map: Array
    lengths: Array
    packed_token_indices: Array


def pack(beams: Array) -> Packed:
    """Keep each distinct prefix of the beams once, and the mask by which a node sees its ancestors.

    Parameters
    ----------
    beams : integers [B, M, C]
        NumPy's or CuPy's: B batch rows of M beams of C tokens.

    Returns
    -------
    Packed
        In the library of the beams. Costs O(B M C log(B M C)) and the mask itself; nothing has the size of
        a context.

    Raises
    ------
    ArgumentError
        No three axes, an axis of no elements, elements that are no integers.

    Notes
    -----
    Source: "Recurrent Drafter" (arXiv 2403.09919), tree attention; unlike there, pads hold nothing of another
    request and the mask has no columns of the context.

    Examples
    --------
    >>> packed = treeattn.token_tree.pack([[[7, 1, 2], [7, 1, 3]]])  # two beams that share a prefix
    >>> packed.packed_beam.tolist(), packed.position_offsets.tolist()
    ([[7, 1, 2, 3]], [[0, 1, 2, 2]])
    >>> packed.attention_mask[0, 3].tolist()  # the token 3 sees 7, 1 and itself
    [True, True, False, True]
    """
    beams = _checked_beams(beams)
    xp = _array_module(beams)
    batch, rows, columns = beams.shape
    owners = prefix_tree(beams)
    chosen: Array = (owners == xp.arange(rows)[:, None]).reshape(batch, -1)
    slots: Array = xp.cumsum(chosen, axis=1) - 1
    lengths = slots[:, -1] + 1
    unpack_map: Array = xp.take_along_axis(slots.reshape(beams.shape), owners, 1)
    indices: Array = xp.zeros((batch, int(lengths.max())), np.int64)
    row, cell = xp.nonzero(chosen)
    indices[row, slots[row, cell]] = cell
    return Packed(
        packed_beam=xp.take_along_axis(beams.reshape(batch, -1), indices, 1),
        attention_mask=_mask(xp, unpack_map, lengths, indices.shape[1]),
        position_offsets=indices % columns,
        unpack_map=unpack_map,
        lengths=lengths,
        packed_token_indices=indices,
    )


def unpack(x: Array, unpack_map: Array) -> Array:
    """Gather what nodes hold, x [B, L, ..], as beams hold it, [B, M, C, ..], by ``unpack_map`` [B, M, C].

    Raises `ArgumentError` for another batch, or a map that points outside L.

    >>> packed = treeattn.token_tree.pack([[[7, 1, 2], [7, 1, 3]]])
    >>> treeattn.token_tree.unpack(packed.packed_beam, packed.unpack_map).tolist()
    [[[7, 1, 2], [7, 1, 3]]]
    """
    xp = _array_module(x)
    x, unpack_map = xp.asarray(x), xp.asarray(unpack_map)
    if unpack_map.ndim != 3 or unpack_map.dtype.kind not in "iu" or x.ndim < 2 or len(x) != len(unpack_map):
        raise ArgumentError(
            f"x {list(x.shape)} and unpack_map {unpack_map.dtype} {list(unpack_map.shape)}: "
            "[batch, nodes, ..] and integers [batch, beams, tokens] are needed"
        )
    if unpack_map.size and (int(unpack_map.min()) < 0 or int(unpack_map.max()) >= x.shape[1]):
        raise ArgumentError(f"unpack_map points outside the {x.shape[1]} nodes of x")
    unpacked: Array = x[xp.arange(len(x))[:, None, None], unpack_map.astype(np.int64)]
    return unpacked


def prefix_tree(beams: Array) -> Array:
    """The lowest row of the batch row that has the same tokens up to here, int64 [batch, beams, tokens].

    ``T[b, m, c]`` is the least k with ``beams[b, k, :c + 1] == beams[b, m, :c + 1]``. A token is a node of
    the tree where it is the first of its prefix: ``T[b, m, c] == m``. A row may borrow from several rows
    above it, from each up to some column; the first column need not be common, so a batch row may be a
    forest. Two sorts: O(B M C log(B M C)). Raises `ArgumentError` as `pack`.

    >>> treeattn.token_tree.prefix_tree([[[7, 1, 2], [7, 1, 3]]]).tolist()
    [[[0, 0, 0], [0, 0, 1]]]
    """
    beams = _checked_beams(beams)
    xp = _array_module(beams)
    batch, rows, columns = beams.shape
    groups = _groups(xp, beams)
    _, first = xp.unique(groups, return_index=True)  # of each group: the lowest row, since rows ascend
    owners: Array = (first[groups] % (batch * rows)).reshape(columns, batch, rows).transpose(1, 2, 0)
    first_rows: Array = rows * xp.arange(batch)[:, None, None]
    return owners - first_rows


def _groups(xp: Any, beams: Array) -> Array:
    """Numbers [tokens, batch * beams], equal where the prefixes up to this token are, within a batch row.

    In lexicographic order equal prefixes are neighbours, so a prefix is new where it differs from the one
    before it.
    """
    batch, rows, columns = beams.shape
    keys: Array = xp.empty((columns + 1, batch * rows), np.int64)  # the last is the first that is sorted by
    keys[-1] = xp.repeat(xp.arange(batch), rows)
    keys[:-1] = beams.reshape(-1, columns).T[::-1].astype(np.int64)  # 64 bits as they are: equality is enough
    order: Array = xp.lexsort(keys)
    ordered = keys[::-1][:, order]
    new: Array = xp.ones((columns, batch * rows), bool)
    changes: Array = xp.cumsum(ordered[:, 1:] != ordered[:, :-1], axis=0)
    new[:, 1:] = changes[1:] > 0
    groups: Array = xp.empty((columns, batch * rows), np.int64)
    groups[:, order] = (xp.cumsum(new.reshape(-1)) - 1).reshape(new.shape)
    return groups


def _mask(xp: Any, unpack_map: Array, lengths: Array, nodes: int) -> Array:
    """In every beam, the token in a column is seen by those from there on; a pad sees node 0."""
    batch, _, columns = unpack_map.shape
    mask: Array = xp.zeros(batch * nodes * nodes, bool)
    starts: Array = (unpack_map + nodes * xp.arange(batch)[:, None, None]) * nodes
    for column in range(columns):
        mask[starts[..., column:] + unpack_map[..., column, None]] = True
    mask = mask.reshape(batch, nodes, nodes)
    mask[..., 0] |= xp.arange(nodes) >= lengths[:, None]
    return mask


def _checked_beams(beams: Array) -> Array:
    """`beams` as an array of integers [batch, beams, tokens]. Raises `ArgumentError`."""
    if _array_module(beams) is np:
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


def _array_module(array: Array) -> Any:
    """CuPy for its arrays, NumPy for everything else."""
    cupy: Any = sys.modules.get("cupy")  # imported by whatever made an array of CuPy
    return cupy if cupy is not None and isinstance(array, cupy.ndarray) else np
