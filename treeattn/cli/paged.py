"""A cache in pages that lies in a file: which of them are this rank's, and the same tokens in rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn.attention.pages import CheckedTable, rows_of
from treeattn.partial import Array
from treeattn.shards import Layout


class PagedShard:
    """Of a block table [batch, pages of a sequence] a rank's part: a layout deals out places of pages.

    numbers: of its pages in the file. block_table, lengths: as `treeattn.Decoder` takes them. tokens: their
    numbers in a sequence.
    """

    def __init__(
        self, table: Array, pages: tuple[int, int], lengths: Any, layout: Layout, rank: int, size: int
    ) -> None:
        """table: as `as_table` gives it. pages: how many the file has, and tokens of each. Raises
        `ArgumentError`."""
        page_size = pages[1]
        CheckedTable().check(table, pages, lengths, None)
        every = np.arange(table.shape[1])
        places = np.concatenate([every[:0], *(every[run] for run in layout.runs(len(every), rank, size))])
        valid = np.clip(np.asarray(lengths)[:, None] - places * page_size, 0, page_size)
        own = table[:, places]
        self.lengths = valid.sum(axis=1)
        self.numbers = np.unique(own[valid > 0])
        self.block_table = np.where(valid > 0, np.searchsorted(self.numbers, own), -1).astype(np.int32)
        self.tokens = (places[:, None] * page_size + np.arange(page_size)).ravel()

    def rows(self, cache: Array) -> Any:
        """[batch, tokens, ..] of this rank's pages; beyond `lengths` anything."""
        tokens = np.arange(len(self.tokens))
        if not len(cache):
            return np.zeros((len(self.lengths), len(tokens), *cache.shape[2:]), cache.dtype)
        return np.stack([rows_of(cache, np.maximum(row, 0), tokens) for row in self.block_table])
