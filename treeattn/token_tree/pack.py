"""Beams without what they share: each prefix once, and the way back."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from treeattn.errors import ArgumentError
from treeattn.token_tree.mask_words import mask_words
from treeattn.token_tree.prefix_tree import array_module, check_beams, prefix_tree

__all__ = ["Packed", "pack", "unpack"]


class Packed(NamedTuple):
    """What `pack` makes of beams [B, M, C]; L is the most distinct prefixes of a batch row.

    Nodes stand in the order in which beams, read row by row, show them first, so a parent stands before its
    children. Slots from ``lengths[b]`` on are pads: the row's own node 0 again, whatever is asked of them. No
    node sees a pad.

    packed_beam: [B, L] tokens, of the type of the beams.
    attention_mask: [B, L, L] bool, [query, key]: a node sees its ancestors and itself.
    position_offsets: [B, L] int64, the depth from 0, which siblings share. A node's position is that of the
    first token after the context plus this.
    unpack_map: [B, M, C] int64, the slot of every token of the beams.
    lengths: [B] int64, the nodes of each batch row.
    packed_token_indices: [B, L] int64, m * C + c of the token that each node came from.
    """

    packed_beam: Any
    attention_mask: Any
    position_offsets: Any
    unpack_map: Any
    lengths: Any
    packed_token_indices: Any

    @property
    def mask_words(self) -> Any:
        """The mask in bits, uint32 [B, L, ceil(L / 32)], as `treeattn.token_tree.mask_words` packs it."""
        return mask_words(self.attention_mask)


def pack(beams: Any) -> Packed:
    """Keep each distinct prefix of the beams once, and say who sees whom.

    Args:
        beams: [B, M, C] integers, NumPy's or CuPy's: B batch rows of M beams of C tokens.

    Returns:
        A `Packed`, in the library of the beams. Costs O(B M C log(B M C)) beside the mask itself; nothing has
        the size of a context.

    Raises:
        ArgumentError: no three axes, an axis of no elements, elements that are no integers.

    Source: "Recurrent Drafter" (arXiv 2403.09919), tree attention; unlike there, pads hold nothing of another
    request and the mask has no columns of the context.
    """
    beams = check_beams(beams)
    xp = array_module(beams)
    batch, rows, columns = beams.shape
    owners = prefix_tree(beams)
    chosen = (owners == xp.arange(rows)[:, None]).reshape(batch, -1)
    slots = xp.cumsum(chosen, axis=1) - 1
    lengths = slots[:, -1] + 1
    unpack_map = xp.take_along_axis(slots.reshape(beams.shape), owners, 1)
    indices = xp.zeros((batch, int(lengths.max())), xp.int64)
    row, cell = xp.nonzero(chosen)
    indices[row, slots[row, cell]] = cell
    return Packed(
        xp.take_along_axis(beams.reshape(batch, -1), indices, 1),
        _mask(xp, unpack_map, lengths, indices.shape[1]),
        indices % columns,
        unpack_map,
        lengths,
        indices,
    )


def _mask(xp: Any, unpack_map: Any, lengths: Any, nodes: int) -> Any:
    """In every beam, the token in a column is seen by those from there on; a pad sees node 0."""
    batch, _, columns = unpack_map.shape
    mask = xp.zeros(batch * nodes * nodes, bool)
    starts = (unpack_map + nodes * xp.arange(batch)[:, None, None]) * nodes
    for column in range(columns):
        mask[starts[..., column:] + unpack_map[..., column, None]] = True
    mask = mask.reshape(batch, nodes, nodes)
    mask[..., 0] |= xp.arange(nodes) >= lengths[:, None]
    return mask


def unpack(x: Any, unpack_map: Any) -> Any:
    """What nodes hold as what beams hold: x [B, L, ..] and ``unpack_map`` [B, M, C] give [B, M, C, ..].

    Raises `ArgumentError` for another batch, or a map that points outside L.
    """
    xp = array_module(x)
    x, unpack_map = xp.asarray(x), xp.asarray(unpack_map)
    if unpack_map.ndim != 3 or unpack_map.dtype.kind not in "iu" or x.ndim < 2 or len(x) != len(unpack_map):
        raise ArgumentError(
            f"x {list(x.shape)} and unpack_map {unpack_map.dtype} {list(unpack_map.shape)}: "
            "[batch, nodes, ..] and integers [batch, beams, tokens] are needed"
        )
    if unpack_map.size and (int(unpack_map.min()) < 0 or int(unpack_map.max()) >= x.shape[1]):
        raise ArgumentError(f"unpack_map points outside the {x.shape[1]} nodes of x")
    return x[xp.arange(len(x))[:, None, None], unpack_map.astype(np.int64)]
