"""Weights by heads and the cache by tokens, over the same ranks (transformers' ``tp_plan="auto"``).

A rank computes q, k and v of its heads. They come together, which is little for a token, each rank attends
with all heads to its tokens, and ``output="heads"`` leaves it the heads that its rows of the output
projection take.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from treeattn.errors import ArgumentError


def is_sharded(own: int, heads: int | None, size: int) -> bool:
    """Whether `own` query heads are the part of `heads` that one of `size` ranks has. Raises `ArgumentError`
    for another part."""
    if heads is None or own == heads:
        return False
    if own * size != heads:
        raise ArgumentError(
            f"this rank has {own} of {heads} query heads, and the cache {size} ranks: the weights must be "
            "tensor parallel over the ranks of the cache, or on none"
        )
    return True


def all_heads(comm: Any, *arrays: Any) -> list[Any]:
    """Arrays [batch, tokens, own heads, dim] with the heads of all ranks, in one message. Collective."""
    on_gpu = isinstance(arrays[0], torch.Tensor)
    mine = [array.cpu() if on_gpu else np.ascontiguousarray(array) for array in arrays]
    ranks = zip(*comm.allgather(mine), strict=True)
    if on_gpu:
        return [torch.cat(parts, 2).to(arrays[0].device) for parts in ranks]
    return [np.concatenate(parts, 2) for parts in ranks]


def own_heads(comm: Any, array: Any, axis: int, heads: int) -> Any:
    """This rank's part of results for all heads, which `output="heads"` has left already."""
    if array.shape[axis] == heads:
        return array
    chosen = [slice(None)] * array.ndim
    chosen[axis] = slice(comm.rank * heads, (comm.rank + 1) * heads)
    return array[tuple(chosen)]
