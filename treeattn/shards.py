"""Who owns which tokens.

Attention does not mind the order of the keys, so any partition of the tokens gives the same answer.
Layouts differ in what they are good for: `contiguous` reads fastest, `interleaved` keeps a growing
cache balanced, `zigzag` balances the causal work of a prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from treeattn.errors import ArgumentError

LAYOUTS = ("contiguous", "interleaved", "zigzag", "sizes=a,b,..")


@dataclass(frozen=True, slots=True)
class Layout:
    """A named rule that gives every token to exactly one of `size` ranks."""

    name: str
    sizes: tuple[int, ...] = ()

    def runs(self, tokens: int, rank: int, size: int) -> tuple[slice, ...]:
        """The slices of the token axis that `rank` owns, in ascending order.

        contiguous: balanced blocks, sizes differ by at most one. interleaved: token t on rank
        t mod size. zigzag: 2 * size balanced blocks, rank r owns blocks r and 2 * size - 1 - r.
        Raises `ArgumentError` if explicit sizes do not fit `size` ranks or `tokens`.
        """
        if self.name == "contiguous":
            return (block(tokens, rank, size),)
        if self.name == "interleaved":
            return (slice(min(rank, tokens), tokens, size),)
        if self.name == "zigzag":
            return (block(tokens, rank, 2 * size), block(tokens, 2 * size - 1 - rank, 2 * size))
        if len(self.sizes) != size:
            raise ArgumentError(
                f"layout {self} names {len(self.sizes)} shards for {size} ranks: give one size per rank"
            )
        if sum(self.sizes) != tokens:
            raise ArgumentError(
                f"layout {self} adds up to {sum(self.sizes)} tokens, the cache has {tokens}: "
                "the sizes must add up to the tokens"
            )
        start = sum(self.sizes[:rank])
        return (slice(start, start + self.sizes[rank]),)

    def shard_lengths(self, lengths: Any, tokens: int, rank: int, size: int) -> Any:
        """Valid tokens [batch] of this rank's shard, from global `lengths` [batch].

        A sequence is valid up to its length; runs ascend, so its valid tokens are a prefix of the shard.
        """
        own = np.zeros(len(lengths), np.int64)
        for run in self.runs(tokens, rank, size):
            start, stop, step = run.indices(tokens)
            valid = np.clip(np.asarray(lengths), start, stop)
            own += (valid - start + step - 1) // step
        return own

    def __str__(self) -> str:
        return self.name if self.name != "sizes" else "sizes=" + ",".join(map(str, self.sizes))


def block(tokens: int, index: int, count: int) -> slice:
    """Block `index` of `count` balanced ones."""
    return slice(index * tokens // count, (index + 1) * tokens // count)


def parts(tokens: int, most: int | None) -> list[slice]:
    """Slices of the tokens 0, 1, .., in order: as few slices of at most `most` as there can be, or one
    slice."""
    step = most or max(1, tokens)
    return [slice(begin, begin + step) for begin in range(0, tokens, step)]


def parse_layout(text: str) -> Layout:
    """Read ``contiguous``, ``interleaved``, ``zigzag`` or ``sizes=a,b,..``. Raises `ArgumentError`."""
    if text in LAYOUTS[:3]:
        return Layout(str(text))  # perhaps NumPy's, which no JSON takes
    name, _, values = text.partition("=")
    if name != "sizes":
        raise ArgumentError(f"unknown layout {text!r}: choose one of {', '.join(LAYOUTS)}")
    try:
        sizes = tuple(int(value) for value in values.split(","))
    except ValueError:
        raise ArgumentError(f"layout {text!r}: sizes are whole numbers separated by commas") from None
    if min(sizes) < 0:
        raise ArgumentError(f"layout {text!r}: a shard cannot have {min(sizes)} tokens; 0 is the least")
    return Layout("sizes", sizes)
