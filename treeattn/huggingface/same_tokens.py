"""Ranks that were given different tokens are told so, before they mix them to another text."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from treeattn.agreement import Agreement
from treeattn.errors import ArgumentError

__all__ = ["check"]

#: Values of the keys that are compared, evenly spaced.
_VALUES = 512


def check(comm: Any, key: torch.Tensor, begins: Any) -> None:
    """Raise `ArgumentError` on every rank unless all have the same new keys and padding. Collective.

    key [batch, kv_heads, tokens, dim], begins [batch] or None. Keys are equal within the square root of the
    precision of their type, since unequal processors round otherwise. Compared are a few of them: prompts of
    many tokens that differ in a few alone may pass.
    """
    rows = key.detach().transpose(1, 2)
    places = np.linspace(0, rows.numel() - 1, min(_VALUES, rows.numel())).astype(int)
    chosen = tuple(torch.from_numpy(place).to(rows.device) for place in np.unravel_index(places, rows.shape))
    with Agreement(comm) as agreed:
        values = rows[chosen].double().cpu().numpy()
        agreed.share = tuple(rows.shape), None if begins is None else begins.tolist(), values
    (*alike, first), near = agreed.gathered[0], torch.finfo(key.dtype).eps ** 0.5
    floor = near * float(np.median(np.abs(first)))
    for rank, (*others, values) in enumerate(agreed.gathered):
        if others != alike or not np.allclose(values, first, rtol=near, atol=floor, equal_nan=True):
            raise ArgumentError(
                f"ranks were given different tokens: those of rank {rank} are not those of rank 0; every "
                "rank must pass the same prompt and padding, and go on with cache.agreed(scores)"
            )
