"""Into how many splits a shard is cut, and how they are merged: a rule that measurements on an H200 confirm.

Every multiprocessor has as many blocks as the kernel asks for (`Variant.blocks`): a count between two of
these leaves some with more work than others. Each block has two steps of tokens at least, of wide tiles four.
Over few tokens the splits of few rows are the blocks of a cluster, which no count of others beats there.
Tests hold the rule to the best of all counts that were tried (``docs/results/gpu_h200.json``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

#: MAX_SPLITS of kernels/cuda/attention.cuh.
MAX_SPLITS = 256

#: Blocks of a cluster, and splits: CLUSTER of kernels/cuda/cluster.cuh.
CLUSTER = 8

_EXACT_BITS = 6  # of a number of steps that a choice looks at
_WHOLE = 256  # partials up to which one level of merging was the fastest


class Load(NamedTuple):
    """What a launch has to do, and on what.

    tiles: batch * KV heads * tiles of rows, which is the blocks of one split. rows: of a tile. tokens: of the
    shard. step: of the kernel's `Variant`. slots: blocks that the device shall have. merging: blocks of the
    launch that merges the splits; 0: the last blocks of the launch that makes them do.
    """

    tiles: int
    rows: int
    tokens: int
    head_dim: int
    step: int
    slots: int
    merging: int = 0


class Splits(NamedTuple):
    """How many splits, and how many of them are merged at once: all, or the groups' size."""

    number: int
    fan: int

    @property
    def groups(self) -> int:
        """How many groups of splits there are."""
        return -(-self.number // self.fan)


def rounded_steps(tokens: int, step: int) -> int:
    """How many steps a choice of splits takes so many tokens for: rounded up to six leading bits, so that a
    cache that grows token by token asks once in a while."""
    steps = -(-tokens // step)
    shift = max(0, steps.bit_length() - _EXACT_BITS)
    return -(-steps >> shift) << shift


def cluster_tokens(tiles: int, rows: int, multiprocessors: int) -> range:
    """For how many tokens the splits of `tiles` tiles of `rows` rows are the blocks of clusters, where there
    is such a kernel.

    A cluster lies in a part of the device, and not all fit where they would fill more than half of it. Its
    blocks are too few the sooner the more others there could be, but more rows make these merge longer.
    """
    others = multiprocessors // tiles
    if others < 2 * CLUSTER:
        return range(0)
    most = max(2, 32 >> (others - 2 * CLUSTER) // 2) << 10
    return range(256, (2 * most if rows > 8 else most) + 1)


def choose_splits(load: Load, number: int | None = None) -> Splits:
    """The splits of a launch, for tokens as `rounded_steps` takes them, and how so many are merged; with
    `number` given, how so many are."""
    if number is None:
        steps = rounded_steps(load.tokens, load.step) // (4 if load.rows > 16 else 2)
        number = max(1, min(load.slots // load.tiles, steps, MAX_SPLITS))
    whole = load.merging or min(load.rows, 16) * number <= _WHOLE
    return Splits(number, number if whole else math.ceil(math.sqrt(number)))
