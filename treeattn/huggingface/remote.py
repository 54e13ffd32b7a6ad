"""A layer of a cache that lies on cache nodes, used as the layers of a sharded one are."""

from __future__ import annotations

from typing import Any

from treeattn.cache_nodes import RemoteCache
from treeattn.huggingface.plans import Scoring
from treeattn.huggingface.tensors import as_tensor


class RemoteLayer:
    """Layer `number` of a cache. transformers crops and reorders layer by layer, the nodes all at once: the
    first layer says it for all."""

    def __init__(self, cache: RemoteCache, number: int) -> None:
        self.cache, self._number = cache, number

    @property
    def totals(self) -> Any:
        """Tokens of each sequence, int64 [batch]."""
        return self.cache.totals[self._number]

    def append(self, k: Any, v: Any = None, counts: Any = None) -> None:
        """Add the next tokens of each sequence."""
        self.cache.append(self._number, k.cpu(), None if v is None else v.cpu())

    append_own = append  # rank 0 has all of them

    def rollback(self, totals: Any) -> None:
        """Forget all but the first `totals` tokens of each sequence."""
        if self._number == 0:
            self.cache.rollback(totals)

    def select(self, rows: Any) -> None:
        """Go on with these sequences."""
        if self._number == 0:
            self.cache.select(rows)

    def attend(self, q: Any, new: tuple[Any, ...], begins: Any, scoring: Scoring) -> tuple[Any, ...]:
        """Attention to all tokens, of which k and v in `new` come with q."""
        how: dict[str, Any] = {"begins": begins, "scale": scoring.scale, "rules": scoring.rules()}
        both = self.cache.step(self._number, *(one.cpu() for one in (q, *new)), **how)
        return tuple(as_tensor(one).to(q.device) for one in both)
