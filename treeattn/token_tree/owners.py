"""Which rank counts which draft token: each exactly once, and every rank knows without a message.

Attention is a sum over a set of keys, so who counts a key changes nothing but the work and, once a draft is
kept, where it should lie.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn.errors import ArgumentError
from treeattn.token_tree.tree import TokenTree

__all__ = ["OWNERS", "check_owner", "draft_owners"]

#: What ``owner=`` takes beside a rank for each slot, and what it needs to know.
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


def draft_owners(owner: Any, tree: TokenTree, size: int, shard_lengths: Any = None) -> Any:
    """The rank that counts each slot, int64 [batch, L].

    Args:
        owner: "single": for each row the rank with the fewest tokens of its context, the lowest of equals.
            "position": the one that owns the node's position in an interleaved cache, (context + depth) mod
            size, so that drafts that are kept lie right already. "round_robin": slot mod size. Or ranks
            [batch, L], as `ShardedCache.owners` has them for any owner map.
        tree: the drafts.
        size: number of ranks.
        shard_lengths: [size, batch] valid tokens on each rank; "position" needs them, and without them
            "single" is rank 0.

    Raises:
        ArgumentError: an unknown name, ranks that are none.
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
    if shard_lengths is not None:
        shard_lengths = np.asarray(shard_lengths)
        if shard_lengths.shape != (size, shape[0]):
            raise ArgumentError(
                f"shard_lengths have shape {list(shard_lengths.shape)}: [ranks, batch] = {[size, shape[0]]}"
            )
    elif owner == "position":
        raise ArgumentError(
            "owner='position' asks how long the context is: pass shard_lengths= [ranks, batch], which a "
            "ShardedCache knows, or the owners themselves"
        )
    else:
        return np.zeros(shape, np.int64)
    if owner == "single":
        return np.broadcast_to(shard_lengths.argmin(0)[:, None], shape)
    return (shard_lengths.sum(0)[:, None] + tree.depths) % size
