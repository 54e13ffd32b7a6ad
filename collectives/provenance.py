"""Where a value comes from: expressions over the ranks' contributions, and who holds which of them.

An expression is a small integer, equal for equal merges (hash-consing), so that comparing what two
ranks hold is comparing integers. Each one carries the ranks that it contains as a bit mask: a mask
that overlaps another at a merge is a rank counted twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import pairwise

#: In the place of an expression: there is none.
NOTHING = -1

# The chunks first .. end - 1 that share one expression: (first, end, expression).
Piece = tuple[int, int, int]


class Expressions:
    """Every value that a reduction forms, each once.

    A pairwise merge is an unordered pair: the operator is commutative to the bit. A merge of three or
    more values is opaque, a result that belongs to the rank and round that made it; `ordered` names
    the pairwise expression that it becomes when it is folded in the given order.
    """

    def __init__(self, size: int) -> None:
        self.mask = [1 << rank for rank in range(size)]
        self.lowest = list(range(size))
        self.depth = [0] * size
        self.ordered = list(range(size))
        self._known: dict[tuple[object, ...], int] = {}

    def pair(self, a: int, b: int) -> int:
        """The merge of two expressions without common ranks."""
        key = (a, b) if a < b else (b, a)
        found = self._known.get(key)
        if found is not None:
            return found
        ordered, depth = self.ordered, 1 + max(self.depth[a], self.depth[b])
        lowest = min(self.lowest[a], self.lowest[b])
        new = self._known[key] = self._append(self.mask[a] | self.mask[b], lowest, depth)
        if ordered[a] != a or ordered[b] != b:
            ordered[new] = self.pair(ordered[a], ordered[b])
            self.depth[new] = self.depth[ordered[new]]
        return new

    def fold(self, operands: Sequence[int], rank: int, round_number: int) -> int:
        """The merge of one or more expressions, already in the order of the fold, done by `rank`."""
        if len(operands) == 1:
            return operands[0]
        if len(operands) == 2:
            return self.pair(operands[0], operands[1])
        key = (round_number, rank, *operands)
        found = self._known.get(key)
        if found is not None:
            return found
        ordered = reduce(self.pair, (self.ordered[operand] for operand in operands))
        new = self._append(self.mask[ordered], self.lowest[ordered], self.depth[ordered])
        self._known[key], self.ordered[new] = new, ordered
        return new

    def name(self, mask: int) -> int:
        """A new expression of these ranks that stands for others, which differ by place."""
        return self._append(mask, (mask & -mask).bit_length() - 1, 0)

    def _append(self, mask: int, lowest: int, depth: int) -> int:
        new = len(self.mask)
        self.mask.append(mask)
        self.lowest.append(lowest)
        self.depth.append(depth)
        self.ordered.append(new)
        return new

    def ranks(self, mask: int) -> list[int]:
        """The ranks of a bit mask, ascending."""
        return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]


class ChunkMap:
    """What one rank holds: an expression for each chunk, kept as the longest runs of equal ones.

    Runs are why a reduce-scatter over thousands of ranks stays cheap: a rank holds about log2 p of
    them, not p chunks.
    """

    __slots__ = ("_chunks", "_starts", "_values")

    def __init__(self, chunks: int, value: int) -> None:
        self._chunks = chunks
        self._starts = [0]
        self._values = [value]

    def read(self, first: int, end: int) -> list[Piece]:
        """The pieces of the chunks first .. end - 1, cut to them."""
        starts, values = self._starts, self._values
        low = bisect_right(starts, first) - 1
        if low + 1 == len(starts) or starts[low + 1] >= end:
            return [(first, end, values[low])]
        high = bisect_right(starts, end - 1, low)
        bounds = [first, *starts[low + 1 : high], end]
        return [(*cut, value) for cut, value in zip(pairwise(bounds), values[low:high], strict=True)]

    def write(self, pieces: Sequence[Piece]) -> None:
        """Replace adjoining pieces; equal neighbours become one run."""
        starts, values = self._starts, self._values
        first, end = pieces[0][0], pieces[-1][1]
        if len(pieces) == 1 and first == 0 and end == self._chunks:
            self._starts, self._values = [0], [pieces[0][2]]
            return
        low = bisect_right(starts, first) - 1
        high = bisect_right(starts, end - 1, low) - 1
        left = [(starts[low], values[low])] if starts[low] < first else []
        if not left and low > 0:
            low -= 1
            left = [(starts[low], values[low])]
        run_end = starts[high + 1] if high + 1 < len(starts) else self._chunks
        right = [(end, values[high])] if end < run_end else []
        if not right and high + 1 < len(starts):
            high += 1
            right = [(starts[high], values[high])]
        runs = [*left, *((start, value) for start, _, value in pieces), *right]
        runs = [run for i, run in enumerate(runs) if i == 0 or run[1] != runs[i - 1][1]]
        starts[low : high + 1] = [start for start, _ in runs]
        values[low : high + 1] = [value for _, value in runs]


def aligned(columns: Sequence[list[Piece]]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Cut several lists of pieces over the same chunks at all their bounds: (first, end, expressions)."""
    if all(len(pieces) == 1 for pieces in columns):
        first, end, _ = columns[0][0]
        yield first, end, tuple(pieces[0][2] for pieces in columns)
        return
    bounds = sorted({first for pieces in columns for first, _, _ in pieces} | {columns[0][-1][1]})
    positions = [0] * len(columns)
    for first, end in pairwise(bounds):
        for i, pieces in enumerate(columns):
            positions[i] += pieces[positions[i]][1] <= first
        yield first, end, tuple(pieces[at][2] for pieces, at in zip(columns, positions, strict=True))
