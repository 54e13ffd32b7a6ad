"""Tables of the attention mask of one step, which kernels read.

What depends on position alone (causal bounds, a window, leading tokens, lengths) is for each query one or two
intervals of this shard's tokens: found once per step, nothing outside them is read, and inside them nothing
is asked. What is no interval, a tree of draft tokens, is a bit mask over the last few tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeattn.attention.arguments import Rules
from treeattn.attention.positions import MAX_POSITION, Runs
from treeattn.attention.shape import read_lengths
from treeattn.errors import ArgumentError
from treeattn.partial import Array

#: Sequences, with one query each, up to which tables are filled one by one.
_FEW = 8


class MaskTables:
    """The tables of a step, for one shard. They keep their places, so that a kernel can be planned on them.

    intervals: int64 [batch, queries, 4], as `intervals_of`; lengths are in them. q_positions: int64
    [batch, queries]. runs: of the tokens before the drafts. Of draft tokens, the last of each sequence:
    drafts: how many. draft_begins: int64 [batch], index of the first. draft_positions: int64 [batch, drafts].
    mask: uint32 [batch, queries, words], bit j % 32 of word j // 32: whether draft j is seen. version: rises
    whenever runs, mask or draft_positions become another array.
    """

    def __init__(self, rules: Rules, batch: int, queries: int) -> None:
        self.rules = rules
        # Kernels measure ALiBi's distances in float64: from no further, so that near ones are exact.
        self._behind = MAX_POSITION if rules.alibi is None else 2**52
        self.intervals = np.zeros((batch, queries, 4), np.int64)
        self.q_positions = np.zeros((batch, queries), np.int64)
        self.draft_begins = np.zeros(batch, np.int64)
        self.runs = Runs(())
        self.drafts = 0
        self.mask: Array = np.zeros((batch, queries, 0), np.uint32)
        self.draft_positions = np.zeros((batch, 0), np.int64)
        self.version = 0
        self._few = queries == 1 and batch <= _FEW
        # The same memory, into which an integer goes in a third of the time.
        self._cells, self._stand, self._begins = (
            table.reshape(-1).data for table in (self.intervals, self.q_positions, self.draft_begins)
        )

    def update(
        self,
        runs: Runs | None,
        tokens: int,
        lengths: ArrayLike | None = None,
        q_positions: ArrayLike | None = None,
        mask: Array | None = None,
        draft_positions: ArrayLike | None = None,
        begins: ArrayLike | None = None,
    ) -> None:
        """Fill the tables for arrays of `tokens` tokens.

        runs: of the tokens that are no drafts, at least as many as are valid; None: nothing asks for them.
        lengths: [batch] valid tokens, drafts among them; None: all. The rest as `treeattn.decode` takes it.
        Raises `ArgumentError`.
        """
        if mask is not None or self.drafts or draft_positions is not None:
            self._take_drafts(mask, draft_positions)
        valid = self._context(tokens, lengths)
        if runs is None:
            if self.rules.positional or begins is not None:
                raise ArgumentError("this shard's positions are not known: pass positions=")
            self.intervals[..., :3] = 0
            self.intervals[..., 3] = valid if isinstance(valid, int) else valid[:, None]
            return
        most = valid if isinstance(valid, int) else max(valid.tolist())
        if len(runs) < most:
            raise ArgumentError(f"positions of {len(runs)} tokens are known, but the shard has {most}")
        if runs is not self.runs:
            self.runs, self.version = runs, self.version + 1
        if q_positions is None and self.rules.positional:
            raise ArgumentError(
                f"{', '.join(self.rules.names)} ask for the positions of queries: pass q_positions="
            )
        first = 0 if begins is None else self._first_positions(begins)
        if self._few:
            self._one_by_one(runs, valid, self._stands(q_positions), first)
            return
        self.q_positions[...] = self._positions(q_positions)
        counts = valid if isinstance(valid, int) else valid[:, None]
        first = first if isinstance(first, int) else first[:, None]
        self.intervals[...] = all_intervals_of(self.rules, runs, counts, self.q_positions, first)

    def _one_by_one(self, runs: Runs, valid: int | Array, stands: list[int], first: int | Array) -> None:
        """The tables of a few sequences with one query each: arrays of NumPy would take longer."""
        rows, cells = len(stands), self._cells
        counts = [valid] * rows if isinstance(valid, int) else valid.tolist()
        begins = [0] * rows if isinstance(first, int) else first.tolist()
        for row, given in enumerate(zip(counts, stands, begins, strict=True)):
            at = 4 * row
            cells[at], cells[at + 1], cells[at + 2], cells[at + 3] = intervals_of(self.rules, runs, *given)
            self._stand[row] = stands[row]

    def validate(
        self, tokens: int, lengths: ArrayLike | None, q_positions: ArrayLike | None, *more: Any, **named: Any
    ) -> None:
        """Raise `ArgumentError` for what `update` will refuse, before positions are known. `draft_begins`
        holds then how many tokens of each sequence are no drafts."""
        stands = self.q_positions if q_positions is None else q_positions
        self.update(Runs([(0, 1, tokens)]), tokens, lengths, stands, *more, **named)

    def seen(self, row: int, query: int) -> tuple[Array, Array | None]:
        """The tokens that a query sees, int64, and where they stand, int64, if a rule asks for that."""
        pieces = self.intervals[row, query].reshape(2, 2).tolist()
        bits = np.unpackbits(self.mask[row, query].astype("<u4").view(np.uint8), bitorder="little")
        drafts = np.flatnonzero(bits[: self.drafts])
        context = [np.arange(*piece) for piece in pieces]
        tokens = np.concatenate([*context, self.draft_begins[row] + drafts])
        if self.rules.alibi is None:
            return tokens, None
        stands = [self.runs.positions(*piece) for piece in pieces if piece[0] < piece[1]]
        return tokens, np.concatenate([*stands, self.draft_positions[row, drafts]])

    def _context(self, tokens: int, lengths: ArrayLike | None) -> int | Array:
        """Tokens before the drafts: one number for all sequences, or int64 [batch]."""
        if lengths is None:
            if self.drafts > tokens:
                raise ArgumentError(f"{self.drafts} draft tokens cannot be the last of a shard of {tokens}")
            for row in range(len(self._begins)):
                self._begins[row] = tokens - self.drafts
            return tokens - self.drafts
        lengths = np.asarray(lengths)
        if self._few and lengths.shape == self.draft_begins.shape and lengths.dtype.kind in "iu":
            counts = [count - self.drafts for count in lengths.tolist()]
            if 0 <= min(counts) <= max(counts) <= tokens - self.drafts:
                for row, count in enumerate(counts):
                    self._begins[row] = count
                return self.draft_begins
        lengths = read_lengths(lengths, len(self.draft_begins), tokens, self.drafts)
        np.subtract(lengths, self.drafts, out=self.draft_begins, casting="unsafe")
        return self.draft_begins

    def _first_positions(self, given: ArrayLike) -> Array:
        """The positions at which sequences begin, as int64 [batch]. Raises `ArgumentError`."""
        array = np.asarray(given)
        if array.shape != self.draft_begins.shape:
            raise ArgumentError(
                f"begins have shape {list(array.shape)}: [batch] = {list(self.draft_begins.shape)} is needed"
            )
        _check_positions("begins", array)
        return array.astype(np.int64)

    def _take_drafts(self, mask: Array | None, draft_positions: ArrayLike | None) -> None:
        batch, queries = self.q_positions.shape
        self.version += 1
        if mask is None and draft_positions is not None:
            raise ArgumentError("draft_positions are of draft tokens, which a mask names: pass mask=")
        if mask is None:
            self.drafts, self.mask = 0, np.zeros((batch, queries, 0), np.uint32)
            self.draft_positions = np.zeros((batch, 0), np.int64)
            return
        mask = np.asarray(mask)
        if mask.ndim != 3 or mask.shape[:2] != (batch, queries) or mask.dtype != np.bool_:
            raise ArgumentError(
                f"the mask is {mask.dtype} {list(mask.shape)}: bool [batch, queries, drafts] is needed, with "
                f"batch {batch} and queries {queries}"
            )
        drafts = mask.shape[2]
        if draft_positions is not None:
            draft_positions = np.asarray(draft_positions)
            if draft_positions.shape[:-1] not in ((), (batch,)) or not draft_positions.ndim:
                raise ArgumentError(
                    f"draft_positions have shape {list(draft_positions.shape)}: [drafts] or [batch, drafts], "
                    f"with batch {batch}, is needed"
                )
            _check_positions("draft_positions", draft_positions)
            draft_positions = np.broadcast_to(draft_positions, (batch, draft_positions.shape[-1]))
            if draft_positions.shape[1] != drafts:
                raise ArgumentError(
                    f"the mask is of {drafts} draft tokens, and draft_positions of {draft_positions.shape[1]}"
                )
        elif self.rules.alibi is not None:
            raise ArgumentError("alibi asks for the positions of draft tokens: pass draft_positions=")
        else:
            draft_positions = np.zeros((batch, drafts), np.int64)
        self.mask = words_of(mask)
        self.drafts, self.draft_positions = drafts, np.ascontiguousarray(draft_positions, np.int64)

    def _stands(self, given: ArrayLike | None) -> list[int]:
        """The position of each sequence's one query."""
        rows = len(self._begins)
        if given is None:
            return [0] * rows
        if type(given) is np.ndarray and given.dtype.kind in "iu" and given.shape in ((1,), (rows, 1)):
            stands: list[int] = given.reshape(-1).tolist() * (rows if given.ndim == 1 else 1)
            if 0 <= min(stands) <= max(stands) < self._behind:
                return stands
        wanted: list[int] = self._positions(given)[:, 0].tolist()
        return wanted

    def _positions(self, given: ArrayLike | None) -> Array:
        """q_positions as int64 [batch, queries]."""
        if given is None:
            return self.q_positions * 0
        array = np.asarray(given)
        if array.shape not in (self.q_positions.shape, self.q_positions.shape[1:]):
            raise ArgumentError(
                f"q_positions have shape {list(array.shape)}: [queries] or [batch, queries] = "
                f"{list(self.q_positions.shape)} is needed"
            )
        _check_positions("q_positions", array, self._behind)
        return np.broadcast_to(array, self.q_positions.shape).astype(np.int64)


def intervals_of(
    rules: Rules, runs: Runs, tokens: int, position: int, begins: int = 0
) -> tuple[int, int, int, int]:
    """(begin, end, begin, end) of the tokens below `tokens` that a query at `position` may see, in a
    sequence that begins at `begins`: first the leading ones where a window keeps them apart from the
    rest, then the others; both ascend, and do not overlap. Indices of the shard."""
    end = min(tokens, runs.below(position + 1)) if rules.causal else tokens
    first = min(end, runs.below(begins)) if begins else 0
    if rules.window is None:
        return 0, 0, first, end
    left, right = rules.window
    lead = min(end, runs.below(begins + rules.leading))
    begin = first if left is None else runs.below(position - left)
    last = max(lead, end if right is None else min(end, runs.below(position + right + 1)))
    if begin <= lead:
        return 0, 0, first, last
    return first, lead, min(begin, last), last


def all_intervals_of(
    rules: Rules,
    runs: Runs,
    tokens: int | NDArray[np.int64],
    positions: NDArray[np.int64],
    begins: int | NDArray[np.int64] = 0,
) -> NDArray[np.int64]:
    """`intervals_of` of arrays that broadcast to [batch, queries]: int64 [batch, queries, 4]."""
    tokens, positions, begins = np.broadcast_arrays(tokens, positions, begins)
    end = np.minimum(tokens, runs.all_below(positions + 1)) if rules.causal else tokens
    first = np.minimum(end, runs.all_below(begins))
    found = np.zeros((*positions.shape, 4), np.int64)
    found[..., 2], found[..., 3] = first, end
    if rules.window is None:
        return found
    left, right = rules.window
    lead = np.minimum(end, runs.all_below(begins + rules.leading))
    begin = first if left is None else runs.all_below(positions - left)
    last = end if right is None else np.minimum(end, runs.all_below(positions + right + 1))
    last = np.maximum(last, lead)
    joined = begin <= lead
    found[..., 0] = np.where(joined, 0, first)
    found[..., 1] = np.where(joined, 0, lead)
    found[..., 2] = np.where(joined, first, np.minimum(begin, last))
    found[..., 3] = last
    return found


def words_of(mask: Array) -> Array:
    """A bool mask [.., n] as uint32 words [.., ceil(n / 32)]: bit j % 32 of word j // 32 is element j."""
    words = -(-mask.shape[-1] // 32)
    padded = np.zeros((*mask.shape[:-1], 32 * words), np.bool_)
    padded[..., : mask.shape[-1]] = mask
    return np.packbits(padded, axis=-1, bitorder="little").view("<u4").astype(np.uint32)


def _check_positions(name: str, array: Array, behind: int = MAX_POSITION) -> None:
    if array.dtype.kind not in "iu" or (array.size and not 0 <= array.min() <= array.max() < behind):
        most = f"2^{behind.bit_length() - 1}{' under alibi' * (behind < MAX_POSITION)}"
        raise ArgumentError(
            f"{name} must be whole numbers from 0 to {most}, not {array.tolist()!s:.60} of {array.dtype}"
        )
