"""Caches in pages: what a block table says, and whether it can be.

Token t of sequence b lies in page block_table[b, t // page_size], in slot t % page_size. Pages lie anywhere,
in any order, and sequences may share them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from treeattn.attention import arrays
from treeattn.attention.arguments import BlockTable
from treeattn.attention.mask_tables import MaskTables
from treeattn.errors import ArgumentError
from treeattn.partial import Array


def as_table(block_table: BlockTable | None, batch: int) -> Array:
    """A block table as C-contiguous int32 [batch, pages of a sequence]; one that is so already is not copied.
    Raises `ArgumentError`."""
    given = _listed(block_table) if isinstance(block_table, list | tuple) else block_table
    table = arrays.on_host("block_table", given)
    if table.ndim != 2 or table.shape[0] != batch or (table.dtype.kind not in "iu" and table.size):
        raise ArgumentError(
            f"block_table is {table.dtype} {list(table.shape)}: whole numbers [batch, pages of a sequence] = "
            f"[{batch}, any] are needed, -1 where there is no page"
        )
    if table.dtype == np.int32 and table.flags.c_contiguous:
        return table
    if table.size and not -(2**31) <= int(table.min()) <= int(table.max()) < 2**31:
        raise ArgumentError("block_table holds numbers beyond int32, which no page has")
    return np.ascontiguousarray(table, np.int32)


def _listed(rows: Sequence[Sequence[int]]) -> Array:
    try:
        return np.asarray(rows)
    except ValueError:
        raise ArgumentError(
            "block_table has rows of different lengths: fill them up with -1, where there is no page"
        ) from None


def check_lengths(lengths: ArrayLike | None, page_size: int, pages: int) -> None:
    """Raise `ArgumentError` unless lengths are given and `pages` pages of a sequence hold so many tokens."""
    if lengths is None:
        raise ArgumentError(
            "a paged cache needs lengths= [batch]: how many tokens each sequence has in this rank's pages"
        )
    given = np.asarray(lengths)
    if given.dtype.kind in "iu" and given.size and (most := int(given.max())) > pages * page_size:
        raise ArgumentError(
            f"a length of {most} is more than the block table holds, {pages} pages of {page_size} tokens: "
            "add pages to it"
        )


class CheckedTable:
    """The last block table that passed: looked at again where it, or what is read of it, changed."""

    def __init__(self) -> None:
        self._passed: object = None

    def check(
        self, table: Array, cache: tuple[int, ...], lengths: Array | None, tables: MaskTables | None
    ) -> None:
        """Raise `ArgumentError` for entries that cannot be, among those of tokens that some query sees.

        table: as `as_table` gives it. cache: how many pages k and v have, and tokens of each. lengths: int64
        [batch], where there is no `tables`, which has them.
        """
        pages, page_size = cache
        used: Array = np.empty(0, np.int64)
        if tables is not None:
            used = _pages_seen(tables, page_size)
        elif lengths is not None:
            used = np.zeros((len(lengths), 1, 2), np.int64)
            used[:, 0, 1] = (lengths + (page_size - 1)) // page_size
        given = (pages, table.shape, table.tobytes(), bytes(used))
        if given == self._passed:
            return
        if tables is None:
            check_lengths(lengths, page_size, table.shape[1])
        _check_entries(table, pages, used)
        self._passed = given


def _pages_seen(tables: MaskTables, page_size: int) -> Array:
    """Which entries of a table are read, [batch, n, 2], from one to before the other: for each query those of
    its two intervals, and those of drafts."""
    begins, ends = tables.intervals[..., 0::2], tables.intervals[..., 1::2]  # [batch, queries, 2]
    used = np.zeros((len(begins), begins[0].size + 1, 2), np.int64)
    used[:, :-1, 0] = (begins // page_size).reshape(len(begins), -1)
    used[:, :-1, 1] = np.where(begins < ends, -(-ends // page_size), 0).reshape(len(begins), -1)
    if tables.drafts:
        used[:, -1, 0] = tables.draft_begins // page_size
        used[:, -1, 1] = -(-(tables.draft_begins + tables.drafts) // page_size)
    return used


def _check_entries(table: Array, pages: int, used: Array) -> None:
    """used: [batch, n, 2], as `_pages_seen` gives it; nothing where an end is not above its begin."""
    entries = table.shape[1]
    used = np.clip(used, 0, entries)
    row, piece = np.nonzero(used[..., 0] < used[..., 1])
    # At each entry: ranges that begin there, less those that end.
    opened = np.zeros((len(table), entries + 1), np.int64)
    np.add.at(opened, (row, used[row, piece, 0]), 1)
    np.add.at(opened, (row, used[row, piece, 1]), -1)
    read = opened.cumsum(axis=1)[:, :entries] > 0
    wrong = read & ((table < 0) | (table >= pages))
    if wrong.any():
        b, p = np.argwhere(wrong)[0].tolist()
        entry = f"block_table[{b}, {p}] is {table[b, p]}"
        if table[b, p] < 0:
            raise ArgumentError(
                f"{entry}, no page, but sequence {b} has tokens there: pass its page, or lengths"
            )
        raise ArgumentError(f"{entry}, but k and v have {pages} pages: local numbers, from 0 on, are needed")
    ordered = np.sort(np.where(read, table, -1 - np.arange(entries)), axis=1)
    twice = ordered[:, 1:] == ordered[:, :-1]
    if twice.any():
        b, p = np.argwhere(twice)[0].tolist()
        raise ArgumentError(
            f"block_table has page {ordered[b, p]} twice in sequence {b}, whose tokens would count twice: "
            "only other sequences may share it"
        )


def rows_of(cache: Array, table: Array, tokens: Array) -> Array:
    """Keys or values of some tokens of one sequence, a copy [tokens, kv_heads, head_dim].

    cache: [pages, page_size, kv_heads, head_dim]. table: the sequence's row of a block table. tokens: their
    numbers in the order of the table.
    """
    page_size = cache.shape[1]
    rows: Array = cache[table[tokens // page_size], tokens % page_size]
    return rows
