"""One rank's part of the KV cache in a call, and what is known of it when a `Decoder` is planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike

from treeattn.attention import arrays
from treeattn.attention.arrays import AnyArray
from treeattn.attention.pages import BlockTable
from treeattn.attention.positions import Runs, as_runs
from treeattn.attention.shape import CACHE_DTYPES, check_number, dtype_word, read_scales
from treeattn.errors import ArgumentError
from treeattn.shards import Layout, parse_layout

#: What ``positions=`` takes: a layout or its name, runs (start, step, count), slices, or integers [tokens].
Positions = str | Layout | Runs | slice | Sequence[Any] | ArrayLike


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
