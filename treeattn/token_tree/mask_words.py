"""Masks in bits: a column in a bit of a uint32 word, the lowest first."""

from __future__ import annotations

from typing import Any

from treeattn.errors import ArgumentError
from treeattn.token_tree.prefix_tree import array_module

__all__ = ["WORD_BITS", "mask_from_words", "mask_words"]

WORD_BITS = 32


def mask_words(mask: Any, words: int | None = None) -> Any:
    """A bool mask [.., columns] as uint32 [.., words]: column j is bit j % 32 of word j // 32.

    words: how many there are room for; as many as are needed unless said. Raises `ArgumentError` for a mask
    that is not bool, or has more columns than the words hold.
    """
    xp = array_module(mask)
    mask = xp.asarray(mask)
    if mask.dtype != bool or mask.ndim < 1:
        raise ArgumentError(f"a mask is bool [.., columns], not {mask.dtype} {list(mask.shape)}")
    columns = mask.shape[-1]
    needed = -(-columns // WORD_BITS)
    words = needed if words is None else words
    if words < needed:
        raise ArgumentError(
            f"{columns} nodes do not fit into {words} mask words of {WORD_BITS} bits: {needed} are needed"
        )
    wide = xp.zeros((*mask.shape[:-1], words * WORD_BITS), bool)
    wide[..., :columns] = mask
    packed = xp.packbits(wide.reshape(-1), bitorder="little")
    return packed.view("<u4").reshape(*mask.shape[:-1], words)


def mask_from_words(words: Any, columns: int) -> Any:
    """The bool mask [.., columns] that `mask_words` packed. Raises `ArgumentError`."""
    xp = array_module(words)
    words = xp.ascontiguousarray(words)
    if words.dtype != xp.uint32 or words.ndim < 1:
        raise ArgumentError(f"mask words are uint32 [.., words], not {words.dtype} {list(words.shape)}")
    held = words.shape[-1] * WORD_BITS
    if not 0 <= columns <= held:
        raise ArgumentError(f"{columns} nodes: {words.shape[-1]} mask words hold 0 to {held}")
    bits = xp.unpackbits(words.reshape(-1).view(xp.uint8), bitorder="little")
    return bits.reshape(*words.shape[:-1], held)[..., :columns].astype(bool)
