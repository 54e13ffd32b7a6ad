"""Whose tokens stand where, and what a query may see of them: agreed at planning, found anew in each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from treeattn.attention.mask import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs, as_runs, check_owners, interleaved
from treeattn.attention.shape import Shape
from treeattn.errors import ArgumentError
from treeattn.shards import Layout, parse_layout


class Stated(NamedTuple):
    """What a rank says of its tokens at planning.

    positions: as ``positions=`` was given. valid: tokens of each sequence, drafts not counted, [batch] or one
    for all; None where arrays come later. stands, begins: where queries do, and where sequences begin: equal
    on ranks for which they are.
    """

    positions: Any = None
    valid: tuple[int, ...] | None = None
    stands: str | None = None
    begins: str | None = None

    @property
    def layout(self) -> Layout | None:
        """Where positions are a rule for all ranks."""
        if isinstance(self.positions, str):
            return parse_layout(self.positions)
        return self.positions if isinstance(self.positions, Layout) else None

    def told(self) -> Told:
        """What the others need to know. Raises `ArgumentError` for positions that cannot be."""
        given = None if self.positions is None or self.layout is not None else as_runs(self.positions)
        return Told(given, self.valid)


class Told(NamedTuple):
    """What one rank tells the others: its runs where it named them, its tokens where it has them."""

    runs: Runs | None
    valid: tuple[int, ...] | None


def agree(layout: Layout | None, everyone: Sequence[Told], rank: int) -> tuple[Runs | None, Any]:
    """The runs of `rank`, None where nobody knows them yet, and where each sequence ends: int64 [batch], None
    likewise. The same error on all ranks.

    Raises `ArgumentError`: two ranks claim a position, a shard is not the one that the layout gives, or has a
    hole where the next one should join.
    """
    runs = all_runs(layout, everyone)
    if runs is None:
        return None, None
    check_owners(runs)
    if everyone[0].valid is None:
        return runs[rank], None
    for holder, (own, told) in enumerate(zip(runs, everyone, strict=True)):
        most = max(told.valid or (0,))
        if len(own) < most:
            raise ArgumentError(f"rank {holder} has positions for {len(own)} of its {most} tokens")
    ends = [_ends(own, told.valid or ()) for own, told in zip(runs, everyone, strict=True)]
    return runs[rank], np.max(ends, axis=0)


def all_runs(layout: Layout | None, everyone: Sequence[Told]) -> list[Runs] | None:
    """Of every rank, or None where nobody stated any and tokens are not known."""
    named = [told.runs for told in everyone]
    if layout is None and any(runs is not None for runs in named):
        for rank, runs in enumerate(named):
            if runs is None:
                raise ArgumentError(f"rank {rank} passed no positions, but others did: all ranks or none")
        return [runs for runs in named if runs is not None]
    if everyone[0].valid is None:
        size = len(everyone)
        return None if layout is None else [_open_runs(layout, rank, size) for rank in range(size)]
    counts = [max(told.valid or (0,)) for told in everyone]
    if layout is not None:
        return _laid_out(layout, counts)
    _check_joined(everyone, counts)
    starts = np.cumsum([0, *counts])
    return [Runs([(int(start), 1, count)]) for start, count in zip(starts[:-1], counts, strict=True)]


def _laid_out(layout: Layout, counts: list[int]) -> list[Runs]:
    total, size = sum(counts), len(counts)
    runs = [as_runs(layout.runs(total, rank, size)) for rank in range(size)]
    for rank, (own, count) in enumerate(zip(runs, counts, strict=True)):
        if len(own) != count:
            raise ArgumentError(
                f"layout {layout} gives rank {rank} {len(own)} of {total} tokens, but its shard has {count}"
            )
    return runs


def _open_runs(layout: Layout, rank: int, size: int) -> Runs:
    """Of a cache that grows: the rule must not ask how many tokens there will be."""
    if layout.name == "sizes":
        return as_runs(layout.runs(sum(layout.sizes), rank, size))
    if layout.name == "interleaved":
        return interleaved(rank, size)
    raise ArgumentError(
        f"layout {layout} depends on the number of tokens, which a Decoder does not know: pass the positions "
        "themselves, or a layout that does not (interleaved, sizes=a,b,..)"
    )


def _check_joined(everyone: Sequence[Told], counts: list[int]) -> None:
    """Blocks follow one another only where each is full before the next one begins."""
    for row in range(len(everyone[0].valid or ())):
        open_at: int | None = None
        for rank, (told, count) in enumerate(zip(everyone, counts, strict=True)):
            valid = (told.valid or ())[row]
            if valid and open_at is not None:
                raise ArgumentError(
                    f"sequence {row} has a hole: rank {open_at} holds fewer of its tokens than of another "
                    f"sequence, and rank {rank} goes on; pass positions="
                )
            if valid < count:
                open_at = rank if open_at is None else open_at


def _ends(runs: Runs, valid: tuple[int, ...]) -> list[int]:
    return [int(runs.positions(count - 1, count)[0]) + 1 if count else 0 for count in valid]


@dataclass(slots=True)
class Sight:
    """What this rank's queries see, step by step.

    runs: the planned positions of its tokens, None where a step has to bring them. q_positions: the default,
    int64 [batch, queries] or None likewise.
    """

    rules: Rules
    shape: Shape
    runs: Runs | None = None
    q_positions: Any = None

    def tables(self) -> MaskTables:
        """For kernels to be planned on."""
        return MaskTables(self.rules, self.shape.batch, self.shape.queries)

    def look(
        self,
        tables: MaskTables,
        tokens: int,
        lengths: Any,
        q_positions: Any,
        positions: Any,
        mask: Any,
        draft_positions: Any,
        begins: Any = None,
    ) -> None:
        """Fill the tables for a step over arrays of `tokens` tokens. Raises `ArgumentError`."""
        runs = self.runs if positions is None else as_runs(positions)
        if q_positions is None:
            q_positions = self.q_positions
        tables.update(runs, tokens, lengths, q_positions, mask, draft_positions, begins)

    def stand(self, ends: Any) -> None:
        """Where queries stand by default: the last ones of sequences that end at `ends` [batch]."""
        if ends is None:
            return
        stands = np.asarray(ends)[:, None] - self.shape.queries + np.arange(self.shape.queries)
        self.q_positions = stands if (stands >= 0).all() else None
