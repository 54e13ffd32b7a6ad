"""Into how many splits a shard is cut, and how they are merged: the least costly by a small model.

A launch costs, in microseconds::

    launch + wave * waves + hypot(max(megabyte * M, l2_megabyte * L), latency * rounds)
    + level * levels + merged_megabyte * P + next_launch

Blocks that do not fit the device at once run in waves. L: megabytes of keys and values that all tiles of
rows read, times multiprocessors over busy ones where blocks are too few for all. M: those that come from
memory; tiles that read the same tokens in one wave have them from there once, and else from the L2 cache.
rounds: how often a block waits for memory, with as many tokens asked for at once as its kernel asks for. The
bounds of bytes and of waiting are smoothed into one, since memory that is busy answers late. levels: merges
one after another, of the splits of a group and, if there are several groups, of these. P: megabytes of
partials that the last block of each level reads. Heads of more than 256 channels are merged on one level by
a launch of its own, `next_launch` behind the first: P is then what one multiprocessor of those that take part
reads, and all of them read no more at a time than the L2 cache gives.

The constants lie in splits.json beside this file, with the device that they were measured on, if they were.
"""

from __future__ import annotations

import functools
import json
import math
from importlib import resources
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from treeattn import partial
from treeattn.errors import BackendError
from treeattn.partial import Array

#: MAX_SPLITS of kernels/cuda/attention.cuh.
MAX_SPLITS = 256
#: MAX_PARTIALS of kernels/cuda/combine.cuh.
MAX_PARTIALS = 1024
#: Below this package, where `shipped` reads the constants.
CONSTANTS_FILE = "splits.json"

_EXACT_BITS = 6  # of a number of steps that a choice looks at


class Constants(NamedTuple):
    """Microseconds, each above 0: see the module."""

    launch: float
    wave: float
    megabyte: float
    l2_megabyte: float
    latency: float
    level: float
    merged_megabyte: float
    next_launch: float


class Load(NamedTuple):
    """What a launch has to do, and on what.

    tiles: batch * KV heads * tiles of rows, which is the blocks of one split. rows: of a tile. tokens: of the
    shard. token_bytes: of a token's key and value in one KV head. step, in_flight: of the kernel's
    `Variant`. slots: blocks that the device holds at once. sharing: tiles of rows that read the same tokens.
    batch: sequences; the blocks of one come before those of the next. merging: blocks of the launch that
    merges the splits; 0: the last blocks of the launch that makes them do.
    """

    tiles: int
    rows: int
    tokens: int
    head_dim: int
    token_bytes: int
    step: int
    in_flight: int
    slots: int
    multiprocessors: int
    sharing: int = 1
    batch: int = 1
    merging: int = 0


class Splits(NamedTuple):
    """How many splits, and how many of them are merged at once: all, or the groups' size."""

    number: int
    fan: int

    @property
    def groups(self) -> int:
        """How many groups of splits there are."""
        return -(-self.number // self.fan)


@functools.cache
def shipped() -> Constants:
    """The constants that lie beside this file. Raises `BackendError` where one is lacking, or no positive
    number."""
    text = resources.files(__package__).joinpath(CONSTANTS_FILE).read_text(encoding="utf-8")
    try:
        constants = Constants(
            **{name: float(value) for name, value in json.loads(text)["microseconds"].items()}
        )
        if not all(0 < value < math.inf for value in constants):
            raise ValueError("each must be above 0")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BackendError(
            f"{CONSTANTS_FILE} of treeattn.backends.cuda: {error}; reinstall treeattn"
        ) from error
    return constants


def predict(load: Load, splits: ArrayLike, fan: ArrayLike, constants: Constants) -> Array:
    """Microseconds of a launch. splits, fan: numbers, or arrays of them."""
    c, splits, fan = constants, np.asarray(splits), np.asarray(fan)
    blocks = load.tiles * splits
    waves = np.ceil(blocks / load.slots)
    steps = np.ceil(np.ceil(load.tokens / load.step) / splits)
    rounds = waves * np.ceil(steps * load.step / load.in_flight)
    idle = np.maximum(1, load.multiprocessors / blocks)
    megabytes = load.tiles * load.tokens * load.token_bytes / 1e6 * idle
    # Waves over which the tiles are spread that read the same tokens: each has them from memory anew.
    readings = np.minimum(load.sharing, np.ceil(blocks / load.batch / load.slots))
    streamed = np.maximum(c.megabyte * megabytes * readings / load.sharing, c.l2_megabyte * megabytes)
    time: Array = (
        c.launch + c.wave * waves + np.hypot(streamed, c.latency * rounds) + merge_time(load, splits, fan, c)
    )
    return time


def merge_time(load: Load, splits: ArrayLike, fan: ArrayLike, constants: Constants) -> Array:
    """What of it the merge of the splits takes."""
    c, splits, fan = constants, np.asarray(splits), np.asarray(fan)
    part = load.rows * (load.head_dim + partial.EXTRA) * 4 / 1e6
    if load.merging:
        megabyte = max(c.merged_megabyte / min(load.merging, load.multiprocessors), c.l2_megabyte)
        time: Array = c.next_launch + c.level + megabyte * load.tiles * splits * part
    else:
        groups = np.ceil(splits / fan)
        levels, parts = 1 + (groups > 1), fan + (groups > 1) * groups
        time = c.level * levels + c.merged_megabyte * parts * part
    return (splits > 1) * time


def rounded_steps(tokens: int, step: int) -> int:
    """How many steps a choice of splits takes so many tokens for: rounded up to six leading bits, so that a
    cache that grows token by token asks once in a while."""
    steps = -(-tokens // step)
    shift = max(0, steps.bit_length() - _EXACT_BITS)
    return -(-steps >> shift) << shift


def choose_splits(load: Load, number: int | None = None, constants: Constants | None = None) -> Splits:
    """The least costly splits, for tokens as `rounded_steps` takes them; with `number` given, the least
    costly way to merge so many."""
    steps = rounded_steps(load.tokens, load.step)
    return _choose(load._replace(tokens=steps * load.step), number, constants or shipped())


@functools.lru_cache(maxsize=256)
def _choose(load: Load, number: int | None, constants: Constants) -> Splits:
    steps = max(1, math.ceil(load.tokens / load.step))
    splits = np.arange(1, min(MAX_SPLITS, steps) + 1) if number is None else np.array([number])
    # Groups as large as there are of them: then both levels merge as little as can be.
    square = np.ceil(np.sqrt(splits)).astype(int)
    whole = np.where(min(load.rows, 16) * splits <= MAX_PARTIALS, splits, square)
    fans = (splits,) if load.merging else (whole, square)
    times = np.stack([predict(load, splits, fan, constants) for fan in fans])
    way, best = np.unravel_index(np.argmin(times), times.shape)
    return Splits(int(splits[best]), int(fans[way][best]))
