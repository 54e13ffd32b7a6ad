"""Which rank attends to which draft token: each exactly once, known on every rank without a message.

Attention is a sum over a set of keys, so which rank adds a key changes nothing but the work and, once a draft
is kept, where it should lie.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from treeattn.errors import ArgumentError
from treeattn.token_tree.tree import Integers, TokenTree

#: What ``owner=`` takes apart from a rank for each slot.
OWNERS = ("single", "position", "round_robin")


def check_owner(owner: Any) -> object:
    """`owner` in a form that ranks can compare. Raises `ArgumentError` for an unknown name."""
    if not isinstance(owner, str):
        return np.asarray(owner).tolist()
    if owner not in OWNERS:
        raise ArgumentError(
            f"owner {owner!r:.40} is unknown: use one of {', '.join(OWNERS)}, or ranks [batch, nodes]"
        )
    return owner


def draft_owners(owner: Any, tree: TokenTree, size: int, shard_lengths: ArrayLike | None = None) -> Integers:
    """The rank of `size` that attends to each slot, int64 [batch, L].

    owner: "single": for each row the rank with the fewest tokens of its context, the lowest of equals.
    "position": the one that owns the node's position in an interleaved cache, (context + depth) mod size, so
    that drafts that are kept lie right already. "round_robin": slot mod size. Or ranks [batch, L], as
    `ShardedCache.owners` has them for any owner map. shard_lengths: [size, batch] valid tokens on each rank;
    "position" needs them, and without them "single" is rank 0.

    Raises `ArgumentError` for an unknown name or ranks that are none.
    """
    check_owner(owner)
    shape = tree.tokens.shape
    if not isinstance(owner, str):
        ranks = np.asarray(owner)
        right = ranks.shape == shape and ranks.dtype.kind in "iu"
        if not right or (ranks < 0).any() or (ranks >= size).any():
            raise ArgumentError(
                f"owner is {ranks.dtype} {list(ranks.shape)}: ranks from 0 to {size - 1}, one for each of "
                f"{list(shape)} slots"
            )
        return ranks.astype(np.int64)
    if owner == "round_robin":
        return np.broadcast_to(np.arange(shape[1]) % size, shape)
    if shard_lengths is None and owner == "position":
        raise ArgumentError(
            "owner='position' asks how long the context is: pass shard_lengths= [ranks, batch], which a "
            "ShardedCache knows, or the owners themselves"
        )
    lengths = np.zeros((size, shape[0]), np.int64) if shard_lengths is None else np.asarray(shard_lengths)
    if lengths.shape != (size, shape[0]):
        raise ArgumentError(
            f"shard_lengths have shape {list(lengths.shape)}: [ranks, batch] = {[size, shape[0]]}"
        )
    if owner == "single":
        return np.broadcast_to(lengths.argmin(0)[:, None], shape)
    return np.asarray((lengths.sum(0)[:, None] + tree.depths) % size)
