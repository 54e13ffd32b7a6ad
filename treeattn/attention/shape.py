"""What the verbs accept: shapes, dtypes and arrays, checked before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

from treeattn.errors import ArgumentError
from treeattn.partial import Array

if TYPE_CHECKING:
    from treeattn.attention.arguments import Shard

# Input dtypes by name. 16-bit inputs are widened inside the kernels; float64 keeps float64 throughout.
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float64": np.dtype(np.float64),
}
#: Of 8 bits, for k and v alone: a scale for each of them belongs to it.
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
CACHE_DTYPES = DTYPES | {name: np.dtype(getattr(ml_dtypes, name)) for name in FLOAT8}
MAX_HEAD_DIM = 576
# Names of what is looked at in steps: NumPy spells one out anew each time, and keeps some of it.
_NAMES = {dtype: name for name, dtype in CACHE_DTYPES.items()}
_NAMES |= {np.dtype(name): name for name in ("uint8", "uint16")}


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything about q, k and v that must be the same on every rank.

    dtype: of q. kv_dtype: of k and v, one of `CACHE_DTYPES`; None is that of q. k_scale, v_scale: what stored
    elements are multiplied with, a number or one for each KV head; for `FLOAT8`, and needed there.
    """

    batch: int
    queries: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    kv_dtype: str | None = None
    k_scale: Any = None
    v_scale: Any = None
    v_dim: int = 0  # of values and results; 0 becomes head_dim
    page_size: int | None = None  # tokens of a page; None: those of a sequence lie in a row

    def __post_init__(self) -> None:
        object.__setattr__(self, "v_dim", self.v_dim or self.head_dim)
        paged = () if self.page_size is None else ("page_size",)
        for name in ("batch", "queries", "heads", "kv_heads", "head_dim", "v_dim", *paged):
            check_number(name, getattr(self, name))
            object.__setattr__(self, name, int(getattr(self, name)))  # products of NumPy's could overflow
        if self.heads % self.kv_heads:
            raise ArgumentError(
                f"{self.heads} query heads cannot be grouped over {self.kv_heads} KV heads: "
                "heads must be a multiple of kv_heads"
            )
        self._check_widths()
        for name in ("dtype", "kv_dtype"):
            object.__setattr__(self, name, dtype_word(getattr(self, name)))
        if self.dtype not in DTYPES:
            raise ArgumentError(f"dtype {self.dtype!r:.60} is not supported: use one of {', '.join(DTYPES)}")
        self._check_cache_dtype()

    def _check_widths(self) -> None:
        for name, value in (("head_dim", self.head_dim), ("v_dim", self.v_dim)):
            if value % 8 or value > MAX_HEAD_DIM:
                raise ArgumentError(
                    f"{name} {value} is not supported: use a multiple of 8 up to {MAX_HEAD_DIM}"
                )

    def _check_cache_dtype(self) -> None:
        object.__setattr__(self, "kv_dtype", self.kv_dtype or self.dtype)
        if self.kv_dtype not in CACHE_DTYPES:
            raise ArgumentError(
                f"dtype {self.kv_dtype!r} of k and v is not supported: use one of {', '.join(CACHE_DTYPES)}"
            )
        if self.kv_dtype == "float64" != self.dtype:
            raise ArgumentError(f"k and v are float64, but q is {self.dtype}: make it float64, too")
        for name in ("k_scale", "v_scale"):
            scales = read_scales(name, getattr(self, name))
            if isinstance(scales, float):
                scales = (scales,) * self.kv_heads
            if scales is not None and len(scales) != self.kv_heads:
                raise ArgumentError(f"{name} must be a number, or one for each of {self.kv_heads} KV heads")
            if (scales is None) == (self.kv_dtype in FLOAT8):
                raise ArgumentError(
                    f"a cache of {self.kv_dtype} needs {name}: a number, or one for each KV head"
                    if scales is None
                    else f"{name} is for caches of {' and '.join(FLOAT8)}, not of {self.kv_dtype}"
                )
            object.__setattr__(self, name, scales)

    @property
    def mixed(self) -> bool:
        """Whether k and v are of another type than q."""
        return self.kv_dtype != self.dtype

    @property
    def record_dtype(self) -> np.dtype[Any]:
        """Records, out and lse: float64 for float64 inputs, else float32."""
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    @property
    def plain(self) -> dict[str, Any]:
        """What every `Decoder` is planned with, by name; a cache of another type or width asks for more."""
        names = ("batch", "queries", "heads", "kv_heads", "head_dim", "dtype")
        return {name: getattr(self, name) for name in names}

    @property
    def q_shape(self) -> tuple[int, ...]:
        """The shape of q: [batch, queries, heads, head_dim]."""
        return (self.batch, self.queries, self.heads, self.head_dim)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """The shape of lse: [batch, heads, queries]."""
        return (self.batch, self.heads, self.queries)

    def logit_scale(self, given: float | None) -> float:
        """As given, or 1 / sqrt(head_dim). Raises `ArgumentError` unless the records' type can hold it."""
        if given is None:
            return 1.0 / math.sqrt(self.head_dim)
        try:
            value = math.nan if isinstance(given, bool | np.bool_) else float(given)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not abs(value) <= float(np.finfo(self.record_dtype).max):
            raise ArgumentError(f"scale must be a finite number of {self.record_dtype}, not {given!r:.60}")
        return value

    def accepts(self, q: Array, k: Array, v: Array) -> bool:
        """Whether q, k and v pass the checks below: a few comparisons, for the step."""
        dtype, kv_dtype = DTYPES[self.dtype], CACHE_DTYPES[self.kv_dtype or self.dtype]
        return (
            type(q) is type(k) is type(v) is np.ndarray
            and q.dtype == dtype
            and k.dtype == v.dtype == kv_dtype
            and q.shape == self.q_shape
            and k.ndim == v.ndim == 4
            and k.shape[:3] == v.shape[:3]
            and (k.shape[0] == self.batch if self.page_size is None else k.shape[1] == self.page_size)
            and k.shape[2:] == (self.kv_heads, self.head_dim)
            and v.shape[3] == self.v_dim
            and q.strides[3] == dtype.itemsize
            and k.strides[3] == v.strides[3] == kv_dtype.itemsize
        )

    def check_query(self, q: Array) -> None:
        """Raise `ArgumentError` unless q is [batch, queries, heads, head_dim] of the right dtype."""
        if q.shape != self.q_shape:
            raise ArgumentError(
                f"q has shape {list(q.shape)}, expected [batch, queries, heads, head_dim] = "
                f"{list(self.q_shape)}{in_torch_layout('q', q.shape, self.heads)}"
            )
        self._check_elements("q", q, self.dtype, False)

    def check_cache(self, k: Array, v: Array, what: str = "", *, copied: bool = False) -> None:
        """Raise `ArgumentError` unless k is [batch, tokens, kv_heads, head_dim], or [pages, page_size, ..],
        and v the same with v_dim for head_dim. what: before their names, such as draft_. copied: what is not
        read where it lies may be strided in any way."""
        if k.shape != v.shape and self.v_dim == self.head_dim:
            raise ArgumentError(
                f"{what}k has shape {list(k.shape)} and {what}v {list(v.shape)}: they must be the same"
            )
        paged = self.page_size is not None
        axes = "pages, page_size" if paged else "batch, tokens"
        own = k.shape[1 if paged else 0] if len(k.shape) == 4 else None
        if (own, *k.shape[2:]) != (self.page_size or self.batch, self.kv_heads, self.head_dim):
            first = f"any, {self.page_size}" if paged else f"{self.batch}, any"
            hint = "" if paged else in_torch_layout("k", k.shape, self.kv_heads)
            raise ArgumentError(
                f"{what}k and {what}v have shape {list(k.shape)}, expected [{axes}, kv_heads, head_dim] = "
                f"[{first}, {self.kv_heads}, {self.head_dim}]{hint}"
            )
        if tuple(v.shape) != (*k.shape[:3], self.v_dim):
            raise ArgumentError(
                f"{what}v has shape {list(v.shape)}, expected [{axes}, kv_heads, v_dim] = "
                f"{[*k.shape[:3], self.v_dim]}"
            )
        for name, array in (("k", k), ("v", v)):
            self._check_elements(what + name, array, self.kv_dtype or self.dtype, copied)

    def check_shard(self, shard: Shard) -> None:
        """Raise `ArgumentError` where a shard says other things of the cache than were planned."""
        for name in ("dtype", "v_dim", "k_scale", "v_scale"):
            value, planned = getattr(shard, name), getattr(self, "kv_dtype" if name == "dtype" else name)
            if isinstance(value, float):
                value = (value,) * self.kv_heads
            if value is not None and value != planned:
                raise ArgumentError(
                    f"{name} of the Shard is {value}, but the Decoder was planned for {planned}"
                )

    def check_lengths(self, lengths: ArrayLike, tokens: int) -> Array:
        """`lengths` as int64 [batch], each between 0 and `tokens`. Raises `ArgumentError`."""
        return np.ascontiguousarray(read_lengths(lengths, self.batch, tokens), np.int64)

    def _check_elements(self, name: str, array: Array, dtype: str, copied: bool) -> None:
        if array.dtype != CACHE_DTYPES[dtype] and _NAMES.get(array.dtype, "") != bits_of(dtype):
            raise ArgumentError(
                f"{name} is {array.dtype}, expected {dtype}: k and v are of one type, that of the plan "
                "(dtype= of a Decoder or a cache, bfloat16 unless named; dtype= of a CacheFormat)"
            )
        if array.strides[3] != array.dtype.itemsize and array.size and not copied:
            raise ArgumentError(
                f"{name} is not contiguous in its last axis (head_dim): pass ascontiguousarray({name})"
            )


def check_number(name: str, value: object, least: int = 1) -> None:
    """Raise `ArgumentError` unless it is a whole number, at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        wanted = "a positive whole number" if least == 1 else f"a whole number from {least} on"
        raise ArgumentError(f"{name} must be {wanted}, not {value!r:.60}")


def read_lengths(lengths: ArrayLike, batch: int, tokens: int, drafts: int = 0) -> Array:
    """Whole numbers [batch], each between `drafts` and `tokens`. Raises `ArgumentError`."""
    lengths = np.asarray(lengths)
    if lengths.shape != (batch,) or lengths.dtype.kind not in "iu":
        raise ArgumentError(
            f"lengths must be whole numbers of shape [{batch}] (one per sequence), not {lengths.dtype} of "
            f"shape {list(lengths.shape)}"
        )
    if (lengths < drafts).any() or (lengths > tokens).any():
        least = f"{drafts} (the draft tokens)" if drafts else "0"
        raise ArgumentError(
            f"lengths {lengths.tolist()} must lie between {least} and the shard's {tokens} tokens"
        )
    return lengths


def read_scales(name: str, given: ArrayLike | None) -> float | tuple[float, ...] | None:
    """A number, or one for each KV head, as float32 holds them. Raises `ArgumentError`."""
    if given is None:
        return None
    array = np.asarray(given)
    if array.ndim > 1 or not (array.dtype.kind in "fiu" or array.dtype == DTYPES["bfloat16"]):
        raise ArgumentError(f"{name} must be a number, or one for each KV head")
    array = array.astype(np.float32)
    if not (np.isfinite(array) & (array > 0)).all():
        raise ArgumentError(f"{name} must be finite and above 0")
    return tuple(array.tolist()) if array.ndim else float(array)


def dtype_word(given: Any) -> Any:
    """The name of what ``dtype=`` takes: a name, or an object of NumPy, ml_dtypes, JAX or torch."""
    try:
        return given if isinstance(given, str | None) else np.dtype(given).name
    except TypeError:
        return str(given).removeprefix("torch.")


def in_torch_layout(name: str, shape: Sequence[int], heads: int) -> str:
    """The remedy where an array has its axes as torch's attention has them; else nothing."""
    if len(shape) != 4 or shape[1] != heads or shape[2] == heads:
        return ""
    ours, theirs = (
        ("queries, heads", "heads, queries") if name == "q" else ("tokens, kv_heads", "kv_heads, tokens")
    )
    return (
        f"; {name} is [batch, {ours}, head_dim]; this looks like [batch, {theirs}, head_dim]: transpose(1, 2)"
    )


def bits_of(dtype: str | None) -> str | None:
    """The integer type that carries the bits of a type that NumPy alone does not have; else None."""
    if dtype in FLOAT8:
        return "uint8"
    return "uint16" if dtype == "bfloat16" else None


def dtype_name(array: Array, dtype: str | None = None, served: Mapping[str, np.dtype[Any]] = DTYPES) -> str:
    """Name of an array's dtype as in `served`; `dtype` tells what uint16 and uint8 carry.

    Raises `ArgumentError` for integer and other unsupported dtypes, and where `dtype` contradicts the array.
    """
    if dtype is not None and dtype not in served:
        raise ArgumentError(f"dtype {dtype!r} is not supported: use one of {', '.join(served)}")
    name = _NAMES.get(array.dtype) or str(array.dtype)
    if name == "uint8" and served is CACHE_DTYPES:
        if dtype in FLOAT8:
            return str(dtype)
        raise ArgumentError(f"uint8 arrays carry float8 bits: say of which, Shard(dtype={FLOAT8[0]!r}) or so")
    if name == "uint16":
        if dtype == "bfloat16":
            return "bfloat16"
        raise ArgumentError("uint16 arrays carry bfloat16 bits: say so with Shard(dtype='bfloat16')")
    if name not in served:
        raise ArgumentError(f"arrays of {name} are not supported: use one of {', '.join(served)}")
    if dtype is not None and dtype != name:
        raise ArgumentError(f"the array is {name}, but dtype={dtype!r} (a Decoder's, unless named: bfloat16)")
    return name


def query_dtype(array: Array) -> str:
    """Name of the dtype of a query, or of what has its type: uint16 are the bits of bfloat16."""
    return dtype_name(array, "bfloat16" if array.dtype == np.uint16 else None)


def as_tensor(name: str, array: Array, dtype: str | None = None) -> Array:
    """A NumPy array with four axes whose dtype is one of `DTYPES`, for k and v of `CACHE_DTYPES`; not copied.

    Raises `ArgumentError` for another dtype or number of axes.
    """
    if name == "q" and array.dtype == np.uint16:
        dtype = "bfloat16"
    found = dtype_name(array, dtype, DTYPES if name == "q" else CACHE_DTYPES)
    if array.dtype != CACHE_DTYPES[found]:
        array = array.view(CACHE_DTYPES[found])
    check_axes(name, array)
    return array


def check_axes(name: str, array: Array) -> None:
    """Raise `ArgumentError` unless the array has four axes."""
    if array.ndim != 4:
        axes = "[batch, queries, heads, head_dim]" if name == "q" else "[batch, tokens, kv_heads, head_dim]"
        raise ArgumentError(f"{name} has shape {list(array.shape)}, expected four axes {axes}")


def check_grouping(q: Sequence[int], k: Sequence[int]) -> None:
    """Raise `ArgumentError` where heads fit only with axes as torch's attention has them."""
    (_, queries, heads, _), (_, tokens, kv_heads, _) = q, k
    if kv_heads == 0 or heads % kv_heads == 0:
        return
    swapped = {"q": (queries, kv_heads), "k": (heads, tokens), "q and k": (queries, tokens)}
    for names, (own, grouped) in swapped.items():
        if grouped and own % grouped == 0:
            raise ArgumentError(
                f"q has shape {list(q)} and k {list(k)}: q is [batch, queries, heads, head_dim], k [batch, "
                "tokens, kv_heads, head_dim]; this looks like [batch, heads, queries, head_dim]: "
                f"transpose(1, 2) of {names}"
            )


def check_latent(v_dim: int | None, head_dim: int, scale: float | None) -> None:
    """Raise `ArgumentError` unless the first `v_dim` channels of keys of `head_dim` can be the values."""
    check_number("v_dim", v_dim)
    if v_dim is None or v_dim > head_dim:
        raise ArgumentError(f"v_dim {v_dim!r:.60} must be a number of k's {head_dim} channels")
    if scale is None:
        raise ArgumentError(
            "with v_dim the scale has to be given: it is that of the heads before they were made latent, not "
            f"1/sqrt({head_dim})"
        )


def values_of(k: Array, v: Array | None, v_dim: int | None, scale: float | None) -> Array:
    """What a call means: v, or the first `v_dim` channels of k, not copied. Raises `ArgumentError`."""
    if v is not None:
        return v
    if v_dim is None:
        raise ArgumentError("v is missing: pass it, or Shard(v_dim=), how many channels of k are the values")
    check_latent(v_dim, k.shape[3], scale)
    return k[..., :v_dim]
