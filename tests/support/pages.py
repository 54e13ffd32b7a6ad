"""Caches in pages, made of caches in a row."""

from typing import Any

import numpy as np

SPARE = 3  # pages that nobody uses


def in_pages(array: Any, page_size: int, lengths: Any = None, hidden: float | None = None) -> tuple[Any, Any]:
    """The pages, in any order with others between them, and the block table, which has an entry too many.

    array: [batch, tokens, ..]. lengths: [batch], the tokens that there are. hidden: what stands where no
    token does; None: bits that are NaN in every type of floats.
    """
    batch, tokens = array.shape[:2]
    lengths = np.full(batch, tokens) if lengths is None else np.asarray(lengths)
    counts = -(-lengths // page_size)
    numbers = np.random.default_rng(page_size).permutation(int(counts.sum()) + SPARE).astype(np.int32)
    pages = np.empty((len(numbers), page_size, *array.shape[2:]), array.dtype)
    if hidden is None:
        pages.view(np.uint8)[...] = 0x7F
    else:
        pages[...] = hidden
    table = np.full((batch, int(counts.max(initial=0)) + 1), -1, np.int32)
    for b, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        table[b, :count], numbers = numbers[:count], numbers[count:]
        token = np.arange(length)
        pages[table[b, token // page_size], token % page_size] = array[b, :length]
    return pages, table
