"""Digests of what a text attended to: in which layer, block of tokens and head two runs differ first."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from treeattn.collectives.runtime import watchdog
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.llama.config import Config
from treeattn.llama.tensor_parallel import Tokens
from treeattn.partial import Array

#: Of each block, layer and head.
Digests: TypeAlias = list[list[list[str]]]

BLOCK = 32  # tokens with a digest together
_ODD = 0x9E3779B97F4A7C15


class Attended:
    """Sums modulo 2**64 over the tokens of each block, whichever ranks ran them: numbers of their bits."""

    def __init__(self, config: Config, tokens: int) -> None:
        """Of a text of at most so many tokens in the cache."""
        self._sums = np.zeros((-(-tokens // BLOCK), config.layers, config.heads), np.uint64)
        self._passed = np.zeros((config.layers, 0, config.heads), np.uint64)

    def observe(self, layer: int, attended: Array) -> None:
        """Take what a layer of a pass attended to: [tokens, heads, head_dim]."""
        bits = np.ascontiguousarray(attended, np.float32).view(np.uint32)
        if layer == 0:
            self._passed = np.zeros((len(self._passed), *bits.shape[:2]), np.uint64)
        factors = np.cumprod(np.full(bits.shape[2], _ODD, np.uint64))
        self._passed[layer] = (bits * factors).sum(axis=2)

    def keep(self, rows: NDArray[np.integer[Any]], positions: Tokens) -> None:
        """Count these tokens of the last pass, which stand at `positions`."""
        places = positions.astype(np.uint64) * np.uint64(_ODD) | np.uint64(1)
        passed = np.swapaxes(self._passed[:, rows], 0, 1) * places[:, None, None]
        np.add.at(self._sums, positions // BLOCK, passed)

    def digests(self, comm: Communicator) -> Digests:
        """Over all ranks. Collective."""
        with watchdog.Activity("digests of what was attended to"):
            total: NDArray[np.uint64] = np.sum(comm.allgather(self._sums), axis=0, dtype=np.uint64)
        return [[[f"{one:016x}" for one in heads] for heads in layers] for layers in total.tolist()]


class Difference(NamedTuple):
    """Where two runs part: tokens from the first number to before the second, a layer, and heads of it."""

    tokens: tuple[int, int]
    layer: int
    heads: list[int]


def first_difference(then: Digests, now: Digests) -> Difference | None:
    """Of two runs' digests; None where they are alike, or of models of unlike shapes."""
    one, other = np.array(then), np.array(now)
    places = np.argwhere(one != other) if one.shape == other.shape else one[:0]
    if not len(places):
        return None
    block, layer, _ = (int(index) for index in places[0])
    heads = places[(places[:, :2] == (block, layer)).all(axis=1), 2]
    return Difference((block * BLOCK, (block + 1) * BLOCK), layer, heads.tolist())
