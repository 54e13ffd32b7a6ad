"""Positions of every rank's tokens, and what a query may see of them: agreed at planning, found in each
step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from treeattn import bins
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs, as_runs, check_owners, interleaved
from treeattn.errors import ArgumentError, RestrictionError
from treeattn.partial import Array
from treeattn.shards import Layout


class DeclaredPositions(NamedTuple):
    """What a rank says of its tokens at planning, and the others are told.

    positions: as `treeattn.attention.arguments.read_positions` gives them. valid: tokens of each sequence,
    drafts not counted, [batch] or one for all; None where arrays come later.
    """

    positions: Layout | Runs | None = None
    valid: tuple[int, ...] | None = None

    @property
    def layout(self) -> Layout | None:
        """Where positions are a rule for all ranks, the same on each."""
        return self.positions if isinstance(self.positions, Layout) else None


def digests(
    tables: MaskTables, tokens: int, lengths: Any, seen: dict[str, Any]
) -> tuple[dict[str, str], tuple[int, ...]]:
    """What a step brings (arguments of `MaskTables.update` by name), checked before ranks know of each
    other's positions: digests of what is there, and how many tokens of each sequence are no drafts. Raises
    `ArgumentError`."""
    tables.validate(tokens, lengths, **seen)
    read = {name: getattr(tables, name, None) for name, one in seen.items() if one is not None}
    if "begins" in read:
        read["begins"] = np.asarray(seen["begins"]).astype(np.int64)
    return {name: _named(array) for name, array in read.items()}, tuple(tables.draft_begins.tolist())


def _named(positions: Any) -> str:
    """A few of them, and a digest of all."""
    return f"{positions.tolist()!r:.60} ({hashlib.sha256(positions.tobytes()).hexdigest()[:8]})"


def planned_positions(
    everyone: Sequence[DeclaredPositions], rank: int, queries: int
) -> tuple[Runs | None, Array | None]:
    """Where the tokens of `rank` stand, and queries by default, int64 [batch, queries]: the last ones of each
    sequence; None where a step has to bring them. Raises as `agreed_runs`."""
    runs = agreed_runs(everyone)
    if runs is None or everyone[0].valid is None:
        return None if runs is None else runs[rank], None
    ends = np.max([_ends(*one) for one in zip(runs, everyone, strict=True)], axis=0)
    stands: Array = ends[:, None] - queries + np.arange(queries)
    return runs[rank], stands if (stands >= 0).all() else None


def agreed_runs(everyone: Sequence[DeclaredPositions]) -> list[Runs] | None:
    """The positions of every rank's tokens; None where no rank declared any and tokens are not known.

    Raises `ArgumentError`, the same on all ranks: two claim a position, a shard is not what the layout gives,
    or has a hole where the next one should join.
    """
    runs = _declared_runs(everyone)
    if runs is not None:
        check_owners(runs)
        for rank, (own, declared) in enumerate(zip(runs, everyone, strict=True)):
            if len(own) < (most := max(declared.valid or (0,))):
                raise ArgumentError(f"rank {rank} has positions for {len(own)} of its {most} tokens")
    return runs


def _declared_runs(everyone: Sequence[DeclaredPositions]) -> list[Runs] | None:
    layout, size = everyone[0].layout, len(everyone)
    named = [declared.positions for declared in everyone]
    if layout is None and any(runs is not None for runs in named):
        if None in named:
            lacking = named.index(None)
            raise ArgumentError(f"rank {lacking} passed no positions, but others did: all ranks or none")
        return [runs for runs in named if isinstance(runs, Runs)]
    if everyone[0].valid is None:
        return None if layout is None else [_open_runs(layout, rank, size) for rank in range(size)]
    counts = [max(declared.valid or (0,)) for declared in everyone]
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
    """Positions in a cache that grows: the rule must not depend on how many tokens there will be."""
    if layout.name == "sizes":
        return as_runs(layout.runs(sum(layout.sizes), rank, size))
    if layout.name == "interleaved":
        return interleaved(rank, size)
    raise ArgumentError(
        f"layout {layout} depends on the number of tokens, which a Decoder does not know: pass the positions "
        "themselves, or a layout that does not (interleaved, sizes=a,b,..)"
    )


def _check_joined(everyone: Sequence[DeclaredPositions], counts: list[int]) -> None:
    """Blocks follow one another only where each is full before the next one begins."""
    for row in range(len(everyone[0].valid or ())):
        open_at: int | None = None
        for rank, (declared, count) in enumerate(zip(everyone, counts, strict=True)):
            valid = (declared.valid or ())[row]
            if valid and open_at is not None:
                raise ArgumentError(
                    f"sequence {row} has a hole: rank {open_at} holds fewer of its tokens than of another "
                    f"sequence, and rank {rank} goes on; pass positions="
                )
            if valid < count:
                open_at = rank if open_at is None else open_at


def _ends(runs: Runs, declared: DeclaredPositions) -> list[int]:
    valid = declared.valid or ()
    return [int(runs.positions(count - 1, count)[0]) + 1 if count else 0 for count in valid]


def check_blocks(runs: Runs | None, ranks: int) -> None:
    """Raise `RestrictionError` where the tokens of a rank, at these positions, are not whole blocks of 32, or
    nobody knows."""
    if runs is None and ranks > 1:
        raise RestrictionError(
            "reproducible='blocks' needs the positions of tokens: plan with cache=CacheFormat(positions=)"
        )
    table = [] if runs is None else runs.table.tolist()
    for index, start, step, count in table:
        if (count > 1 and step != 1) or start % bins.BLOCK or index % bins.BLOCK:
            raise RestrictionError(
                f"reproducible='blocks' takes whole blocks of {bins.BLOCK} positions, but position {start} "
                f"begins a part of one: deal out multiples of {bins.BLOCK}, or take reproducible='tokens'"
            )
