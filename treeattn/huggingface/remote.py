"""A layer of a cache that lies on cache nodes, used as the layers of a sharded one are."""

from __future__ import annotations

from typing import Any

import torch

from treeattn.cache_nodes import RemoteCache
from treeattn.huggingface.plans import Scoring
from treeattn.huggingface.tensors import as_rows


class RemoteLayer:
    """Layer `number` of a cache. transformers crops and reorders layer by layer, the nodes all at once: the
    first layer says it for all."""

    def __init__(self, cache: RemoteCache, number: int) -> None:
        self.cache, self._number = cache, number

    @property
    def totals(self) -> Any:
        """Tokens of each sequence, int64 [batch]."""
        return self.cache.totals[self._number]

    def append(self, k: Any, v: Any = None) -> None:
        """Add the next tokens of each sequence."""
        self.cache.append(self._number, _on_host(k), None if v is None else _on_host(v))

    def append_own(self, k: Any, v: Any, counts: Any) -> None:
        """Add the next tokens: rank 0 has all of them."""
        self.append(k, v)

    def rollback(self, totals: Any) -> None:
        """Forget all but the first `totals` tokens of each sequence."""
        if self._number == 0:
            self.cache.rollback(totals)

    def select(self, rows: Any) -> None:
        """Go on with these sequences."""
        if self._number == 0:
            self.cache.select(rows)

    def attend(self, q: Any, new: tuple[Any, ...], begins: Any, scoring: Scoring) -> tuple[Any, Any]:
        """Attention to all tokens, of which k and v in `new` come with q."""
        how: dict[str, Any] = {"begins": begins, "scale": scoring.scale, "rules": scoring.rules()}
        out, lse = self.cache.step(self._number, *map(_on_host, (q, *new)), **how)
        if isinstance(q, torch.Tensor):
            return torch.from_numpy(out).to(q.device), torch.from_numpy(lse).to(q.device)
        return out.copy(), lse.copy()


def _on_host(rows: Any) -> Any:
    """[batch, tokens, heads, dim] of a GPU as an array of the host."""
    return as_rows(rows.transpose(1, 2).cpu()) if isinstance(rows, torch.Tensor) else rows
