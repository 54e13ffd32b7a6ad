"""What calls take besides arrays: one rank's part of the KV cache, what is known of it when a `Decoder` is
planned, and the rules of what a query may attend to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from treeattn.attention import arrays
from treeattn.attention.arrays import AnyArray
from treeattn.attention.positions import MAX_POSITION, Runs, as_runs
from treeattn.attention.shape import CACHE_DTYPES, check_number, dtype_word, read_scales
from treeattn.errors import ArgumentError
from treeattn.partial import Array
from treeattn.shards import Layout, parse_layout

#: What ``block_table=`` takes.
BlockTable = Array | Sequence[Sequence[int]]

#: What ``positions=`` takes: a layout or its name, runs (start, step, count), slices, or integers [tokens].
Positions = str | Layout | Runs | slice | Sequence[Any] | ArrayLike

#: Kernels take the numbers of rules as float32, whatever the inputs are.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The keys and values that this rank holds; goes wherever `k` goes.

    Parameters
    ----------
    k, v : [batch, tokens, kv_heads, head_dim]
        Any library's arrays, read where they lie; tokens may be 0. v may have another width, or be left out
        where `v_dim` says how many of k's first channels are the values (latent attention).
    lengths : [batch], optional
        Valid tokens of each sequence of this shard; all unless given.
    positions : optional
        Global positions of the shard's tokens, ascending: integers [tokens], runs (start, step, count),
        slices, or a layout such as ``"zigzag"``. Default: the shards' blocks follow one another.
    block_table : [batch, pages of a sequence], optional
        Integers, the pages in which a sequence's tokens lie, -1 where there is none. k and v are then this
        rank's pages, [pages, page_size, kv_heads, head_dim], and `lengths` are needed.
    k_scale, v_scale : float or [kv_heads], optional
        What stored elements are multiplied with; caches of float8 need both.
    dtype : str, optional
        What the bits of uint16 and uint8 arrays are: "bfloat16", "float8_e4m3fn" or "float8_e5m2".
    v_dim : int, optional
        How many of k's first channels are the values, where `v` is None.
    draft_positions : [n] or [batch, n], optional
        Positions of the draft tokens that a call's mask names, for ALiBi.

    Raises
    ------
    ArgumentError
        A value that cannot be; the message names it.

    Examples
    --------
    >>> k = np.zeros((1, 3, 2, 8), np.float32)
    >>> shard = treeattn.Shard(k, k, lengths=[2], positions=[0, 4, 8])
    >>> out, lse = treeattn.decode(np.ones((1, 1, 4, 8), np.float32), shard)
    >>> round(float(lse[0, 0, 0]), 4)  # ln 2
    0.6931
    """

    k: AnyArray
    v: AnyArray | None = None
    lengths: ArrayLike | None = None
    positions: Positions | None = None
    block_table: BlockTable | None = None
    k_scale: ArrayLike | None = None
    v_scale: ArrayLike | None = None
    dtype: str | None = None
    v_dim: int | None = None
    draft_positions: ArrayLike | None = None

    def __post_init__(self) -> None:
        arrays.device_of("k", self.k)
        if self.v is not None:
            arrays.device_of("v", self.v)
            if self.v_dim is not None:
                raise ArgumentError("v_dim takes the values out of k: pass v=None, or leave v_dim out")
        _read(self, "v_dim")

    @classmethod
    def of(cls, k: AnyArray | Shard, v: AnyArray | None = None, lengths: ArrayLike | None = None) -> Shard:
        """`k` if it is a shard already, then with `lengths`; else the shard of these arrays. Raises
        `ArgumentError` for what is given twice."""
        if not isinstance(k, Shard):
            return cls(k, v, lengths)
        for name, given, own in (("v", v, k.v), ("lengths", lengths, k.lengths)):
            if given is not None and (own is not None or name == "v"):
                raise ArgumentError(f"{name} is given twice: in the Shard and as an argument")
        return k if lengths is None else cls(**{**k.arguments, "lengths": lengths})

    def holding(self, **others: Any) -> Shard:
        """The same of other arrays, by name, which were looked at."""
        made = object.__new__(Shard)
        for name, value in (self.arguments | others).items():
            object.__setattr__(made, name, value)
        return made

    def in_rows(self, what: str) -> Shard:
        """The shard where it is keys and values in rows, of q's type. Raises `ArgumentError`."""
        for name in ("block_table", "k_scale", "v_scale", "v_dim", "draft_positions"):
            if getattr(self, name) is not None:
                raise ArgumentError(f"{name} of the Shard: {what} a cache in rows, of q's type")
        if self.v is None:
            raise ArgumentError("v is missing: pass it as an argument or in the Shard")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """What it was made of, by name."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """What is known of the cache when a `Decoder` is planned; equal on all ranks but for positions.

    Parameters
    ----------
    dtype : str, optional
        Of k and v: that of q unless named; uint8 arrays carry the bits of a float8.
    v_dim : int, optional
        Channels of the values; head_dim unless given. A step may then leave v out: the values are the first
        v_dim channels of k (latent attention, for which the scale has to be given).
    page_size : int, optional
        Tokens of a page; None: the tokens of a sequence lie in a row.
    k_scale, v_scale : float or [kv_heads], optional
        What stored elements are multiplied with; caches of float8 need both.
    positions : optional
        Global positions of this rank's tokens, those to come among them; as in `Shard`. A layout that does
        not depend on the number of tokens serves a cache that grows.

    Raises
    ------
    ArgumentError
        A value that cannot be; the message names it.

    Examples
    --------
    >>> cache = treeattn.CacheFormat("float8_e4m3fn", k_scale=0.5, v_scale=0.25)
    >>> with treeattn.Decoder(heads=4, kv_heads=2, head_dim=8, dtype="float32", cache=cache) as decoder:
    ...     decoder.shape.kv_dtype
    'float8_e4m3fn'
    """

    dtype: str | None = None
    v_dim: int | None = None
    page_size: int | None = None
    k_scale: ArrayLike | None = None
    v_scale: ArrayLike | None = None
    positions: Positions | None = None

    def __post_init__(self) -> None:
        _read(self, "v_dim", "page_size")


def _read(given: Shard | CacheFormat, *numbers: str) -> None:
    """Check what both have, and give scales and positions their one form."""
    object.__setattr__(given, "dtype", dtype_word(given.dtype))
    if given.dtype is not None and given.dtype not in CACHE_DTYPES:
        raise ArgumentError(
            f"dtype {given.dtype!r:.60} is not supported: use one of {', '.join(CACHE_DTYPES)}"
        )
    for name in numbers:
        if getattr(given, name) is not None:
            check_number(name, getattr(given, name))
    for name in ("k_scale", "v_scale"):
        object.__setattr__(given, name, read_scales(name, getattr(given, name)))
    object.__setattr__(given, "positions", read_positions(given.positions))


def read_positions(given: Positions | None) -> Layout | Runs | None:
    """What ``positions=`` was given, in one of two forms. Raises `ArgumentError`."""
    positions = parse_layout(given) if isinstance(given, str) else given
    return positions if positions is None or isinstance(positions, Layout) else as_runs(positions)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a query may attend to, and what becomes of its logits; equal on all ranks.

    With t the position of the query and s that of a key in the whole sequence, the logit is ``scale * q.k``,
    then ``softcap * tanh(logit / softcap)``, then less ``alibi * (t - s)``. Draft tokens obey their mask
    alone.

    Parameters
    ----------
    causal : bool
        Whether keys after the query (s > t) are masked out.
    window : (left, right), optional
        Only keys with ``t - left <= s <= t + right`` are seen; None is unbounded.
    leading : int
        Keys with ``s < leading`` are seen in spite of the window (attention sinks of StreamingLLM); counted
        from where the sequence begins.
    softcap : float, optional
        Bound of the logits, as in Gemma 2.
    alibi : [heads], optional
        Slope of each query head (Press et al., arXiv 2108.12409); queries then stand below 2^52.
    sink_logits : [heads], optional
        Logit of one more key with the value 0, which counts once in the whole sequence, in lse too.

    Raises
    ------
    ArgumentError
        A value that cannot be; the message names it.

    Examples
    --------
    >>> rules = treeattn.Rules(causal=True, window=(1023, 0), leading=4)
    >>> rules.names  # what a query's position decides
    ('causal', 'window', 'leading')
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    leading: int = 0
    softcap: float | None = None
    alibi: ArrayLike | None = None
    sink_logits: ArrayLike | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool | np.bool_):
            raise ArgumentError(f"causal must be True or False, not {self.causal!r:.60}")
        values = {
            "causal": bool(self.causal),
            "window": _window(self.window),
            "leading": _whole("leading", self.leading),
            "softcap": None if self.softcap is None else _softcap(self.softcap),
            "alibi": _by_head("alibi", self.alibi, finite=True),
            "sink_logits": _by_head("sink_logits", self.sink_logits, finite=False),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, rules: Rules | None, heads: int) -> Rules:
        """`rules`, none for None, of so many query heads. Raises `ArgumentError`."""
        if rules is None:
            return cls()
        if not isinstance(rules, Rules):
            raise ArgumentError(f"rules must be a treeattn.Rules, not {rules!r:.60}")
        for name, values in (("alibi", rules.alibi), ("sink_logits", rules.sink_logits)):
            if values is not None and np.shape(values) != (heads,):
                raise ArgumentError(
                    f"{name} has shape {list(np.shape(values))}: one number for each of {heads} heads"
                )
        return rules

    @property
    def positional(self) -> bool:
        """Whether the position of a query matters."""
        return self.causal or self.window is not None or self.alibi is not None

    @property
    def by_tables(self) -> bool:
        """Whether kernels need tables even where no call brings a mask."""
        return self.positional or self.softcap is not None

    @property
    def names(self) -> tuple[str, ...]:
        """The rules that are in force, by the names of their arguments."""
        return tuple(name for name in self.__slots__ if getattr(self, name) not in (None, False, 0))


def _whole(name: str, value: Any) -> int:
    check_number(name, value, 0)
    return min(int(value), MAX_POSITION)  # which no token has


def _window(window: object) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ArgumentError(f"window must be (left, right), None where it is unbounded, not {window!r:.60}")
    left, right = (None if side is None else _whole("a side of the window", side) for side in window)
    return None if left is right is None else (left, right)


def _softcap(value: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not _SMALLEST <= number <= _LARGEST:
        raise ArgumentError(f"softcap must be a number of float32 above 0, or None, not {value!r:.60}")
    return number


def _by_head(name: str, values: ArrayLike | None, *, finite: bool) -> tuple[float, ...] | None:
    if values is None:
        return None
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{name} cannot be read as numbers: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise ArgumentError(
            f"{name} is {array.dtype} of shape {list(array.shape)}: one number for each head is needed"
        )
    array = array.astype(np.float64)
    if not ((abs(array) <= _LARGEST) | ((array == -np.inf) & (not finite))).all():
        none = "" if finite else ", or -inf for none"
        raise ArgumentError(f"{name} must be finite numbers of float32{none}")
    return tuple(array.tolist())
