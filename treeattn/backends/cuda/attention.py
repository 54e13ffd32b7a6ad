"""Partial attention on an NVIDIA GPU: which kernel, in how many splits, launched without allocating."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from treeattn import partial
from treeattn.attention.mask_tables import MaskTables
from treeattn.backends.cuda.arguments import (
    MAX_GRID,
    check_inputs,
    check_table,
    check_tokens,
    layout_of,
    rows_aligned,
)
from treeattn.backends.cuda.cache import CacheType
from treeattn.backends.cuda.runtime import (
    THREADS,
    Runtime,
    as_bytes,
    check_records,
    default_runtime,
    structure,
)
from treeattn.backends.cuda.splits import (
    CLUSTER,
    MAX_SPLITS,
    Load,
    Splits,
    choose_splits,
    cluster_tokens,
    rounded_steps,
)
from treeattn.backends.cuda.tables import VisibleTables
from treeattn.backends.cuda.variants import (
    TYPES,
    Tokens,
    Variant,
    choose_variant,
    cluster_kernel,
    merge_blocks,
)
from treeattn.errors import ArgumentError
from treeattn.partial import Array

_LARGEST, _ALL = float(np.finfo(np.float32).max), np.iinfo(np.int32).max

#: FEW of kernels/cuda/attention.cuh: lengths of so many sequences may come as numbers.
FEW = 16

# AttentionArguments of kernels/cuda/attention.cuh, and the structures in it.
_STRIDED = structure("data", "batch_stride row_stride head_stride", "")
_MASK = structure("tiles spans views q_positions slopes lookup", "", "")
_PAGES = structure("table", "", "count size", unsigned="by_size by_size_shift")
_SCRATCH = structure(
    "numerators states counters", "", "fan", unsigned="by_splits by_splits_shift by_fan by_fan_shift"
)
_REST = structure(
    "lengths records k_scales v_scales",
    "",
    "tokens queries heads kv_heads group q_type q_aligned",
    "scale softcap by_softcap",
    unsigned="by_group by_group_shift by_kv_heads by_kv_heads_shift",
)
_ATTENTION = np.dtype(
    [
        *((name, _STRIDED) for name in "qkv"),
        *(("mask", _MASK), ("pages", _PAGES), ("scratch", _SCRATCH)),
        *((name, _REST[name]) for name in _REST.names or ()),
        ("results", np.uint64, 2),  # out and lse
        ("few_lengths", np.int32, FEW),
    ],
    align=True,
)


def most_queries(heads: int, kv_heads: int) -> int:
    """Queries that one launch has blocks for, whatever the kernel: tiles of many rows have 2 or more."""
    return MAX_GRID // kv_heads * 2 // (heads // kv_heads)


class PlannedAttention:
    """Writes the records of every query head attending to this device's tokens, where they stay.

    A call takes q [batch, queries, heads, head_dim] and k, v [batch, tokens, kv_heads, head_dim], of any
    strides that keep rows aligned to 16 bytes, the last axis contiguous: float32, float16, bfloat16 or uint16
    (its bits), k and v also of 8 bits; for latent attention v is k[..., :512] of keys of 576. lengths:
    [batch] int64 on the device, read at launch and clamped to 0..tokens, or a tuple of at most `FEW` numbers
    in that range; None: all. block_table: [batch, pages] int32 on the device, below 0 where there is none,
    not looked at; k and v are then [all pages, page_size, ..]. Raises `ArgumentError`, and `BackendError` for
    a head_dim without a kernel.

    Calling it with the arrays of the last call (the same objects) is one launch, and for heads of more than
    256 channels in several splits one more, which merges these: nothing is derived, allocated or waited for.
    It keeps references to them and to its workspace until the next call. With `tables`, tables of the last
    call are compared, and queued to the device where they changed.
    """

    def __init__(
        self,
        records: Array,
        *,
        scale: float,
        tables: MaskTables | None = None,
        kv_dtype: str | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        num_splits: int | None = None,
        tensor_cores: bool = True,
        runtime: Runtime | None = None,
    ) -> None:
        """records: C-contiguous [batch, heads, queries, v's channels + 2], float32. tables: filled anew for
        each call, lengths in it. kv_dtype: what uint8 arrays carry, whose scales are numbers, or one for each
        KV head. num_splits: 1..MAX_SPLITS; None chooses by `choose_splits`. tensor_cores: whether
        probabilities may be held in 16 bits, for speed: then |out - exact| can reach 4e-3 * max|v|; used with
        q of 16 bits, a cache of its type or of 8 bits, and 4 or more rows for each KV head (latent attention
        has no other way). runtime: the device; None is CuPy's current one."""
        self._runtime = runtime = runtime or default_runtime()
        check_records(records, runtime)
        if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
            raise ArgumentError(f"num_splits = {num_splits}: it must be 1..{MAX_SPLITS}")
        self._records = records
        self._num_splits = num_splits
        self._tensor_cores = tensor_cores and runtime.tensor_cores
        self._clusters = runtime.clusters and self._tensor_cores and num_splits is None
        self._arguments = np.zeros(1, _ATTENTION)
        self._arguments["scale"] = scale
        self._arguments["records"] = runtime.address(records)
        self._mask = tables
        self._cache = CacheType(kv_dtype, k_scale, v_scale)
        if tables is not None:
            assert tables.q_positions.shape == (records.shape[0], records.shape[2])
            softcap = tables.rules.softcap or 0
            self._arguments["softcap"] = softcap
            self._arguments["by_softcap"] = min(1 / softcap, _LARGEST) if softcap else 0
        self._places = [self._arguments[name]["data"] for name in "qkv"]
        self._tokens, self._few = self._arguments["tokens"], self._arguments["few_lengths"][0]
        self._scratch = runtime.zeros(0, np.float32)
        self._counters = runtime.zeros(0, np.uint32)
        self._workspaces: list[Any] = []
        #: q, k, v, lengths and block table of the last call; empty where there are none.
        self.bound: tuple[Any, ...] = ()
        self._layout: tuple[Any, ...] = ()
        self._tables: VisibleTables | None = None
        #: The kernel of the last arrays, and for how many tokens of arrays like these it is a cluster's.
        self.variant: Variant
        self._clustered = range(0)
        #: What the last arrays ask for, and into how many splits it is cut.
        self.load: Load
        self.splits: Splits
        self._steps: int
        #: What a call launches, one after the other; others as soon as they change.
        self.launches: tuple[Callable[[], object], ...]
        #: Where the launches find the addresses of out and lse, 0 where they do not finish: every call says.
        self.results = self._arguments["results"][0]

    def __call__(self, *given: Any, finish: Any = None) -> None:
        """given: q, k, v, and perhaps lengths and block table. finish: a `planned_finish` of these records,
        done too: to the bit, in the same launches."""
        if not self.takes(*given):
            self.bind(*given)
        # The arrays of `finish`: records, out and lse.
        self.results[:] = [self._runtime.address(one) for one in finish.arrays[1:]] if finish else 0
        for launch in self.launches:
            launch()

    def takes(
        self, q: Array, k: Array, v: Array, lengths: Any = None, block_table: Array | None = None
    ) -> bool:
        """Whether device arrays are those of the last call, or laid out as these but for the number of
        tokens, which costs their addresses; then they are bound."""
        bound, given = self.bound, (q, k, v, lengths, block_table)
        if not bound:
            return False
        if q is bound[0] and k is bound[1] and v is bound[2] and block_table is bound[4]:
            if lengths is not bound[3]:
                self.bound = ()
                self._bind_lengths(lengths, q)
                self.bound = given
            if self._tables is not None:
                self.refresh()
            return True
        places, layout = self._look(q, k, v, block_table)
        if layout != self._layout:
            return False
        if block_table is None and (k.shape[1] in self._clustered) != self.variant.clustered:
            return False
        self.bound = ()
        if block_table is None:
            check_tokens(k.shape[1])
            self._tokens[0] = k.shape[1]
        elif block_table is not bound[4]:
            check_table(block_table, q.shape[0])
            self._arguments["pages"]["table"] = self._runtime.address(block_table)
        if lengths is not bound[3]:
            self._bind_lengths(lengths, q)
        self._bind_places(places, given)
        return True

    def refresh(self) -> None:
        """Queue what changed of `tables` to the device, as a call does before it launches: a captured call
        reads it there. Raises `ArgumentError` where it speaks of tokens that the last arrays do not have."""
        tables, bound = self._tables, self.bound
        if tables is not None and tables.refresh():
            self.bound = ()
            self._bind_splits(self._tokens[0])
            self.bound = bound

    def bind(
        self, q: Array, k: Array, v: Array, lengths: Any = None, block_table: Array | None = None
    ) -> None:
        """What a call does before it launches, when it is given arrays that are laid out in another way."""
        self.bound = ()
        places, layout = self._look(q, k, v, block_table)
        self._bind_layout(q, k, v, block_table)
        self._bind_lengths(lengths, q)
        self._bind_places(places, (q, k, v, lengths, block_table))
        self._layout = layout

    def _look(
        self, q: Array, k: Array, v: Array, block_table: Array | None
    ) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """Where q, k and v lie, and what decides all else that is bound."""
        runtime = self._runtime
        tables = {} if block_table is None else {"block_table": block_table}
        for name, array in {"q": q, "k": k, "v": v, **tables}.items():
            runtime.check(name, array)
        places = runtime.address(q), runtime.address(k), runtime.address(v)
        paged = None if block_table is None else (k.shape[1], block_table.shape)
        alignment = places[0] % 16, (places[1] | places[2]) % 16, places[1] == places[2]
        return places, (alignment, *layout_of(q, k, v), paged)

    def _bind_places(self, places: tuple[int, ...], given: tuple[Any, ...]) -> None:
        for place, address in zip(self._places, places, strict=True):
            place[0] = address
        if self._tables is not None:
            self._tables.refresh()
        self._bind_splits(self._tokens[0])
        self.bound = given

    def _bind_layout(self, q: Array, k: Array, v: Array, block_table: Array | None) -> None:
        runtime, a = self._runtime, self._arguments
        kv_type = self._cache.kernel_type(k, v)
        q_type = check_inputs(q, k, v, self._records, block_table, runtime)
        for name, array in (("q", q), ("k", k), ("v", v)):
            for axis, stride in zip(("batch", "row", "head"), array.strides[:3], strict=True):
                a[name][f"{axis}_stride"] = stride // (1 if name == "q" else array.dtype.itemsize)
        a["queries"], a["heads"] = q.shape[1:3]
        a["kv_heads"] = k.shape[2]
        self._bind_pages(k, block_table)
        a["k_scales"], a["v_scales"] = self._cache.addresses(k.shape[2], runtime)
        a["group"] = q.shape[2] // k.shape[2]
        a["q_type"] = TYPES[q.dtype.name][1]
        a["q_aligned"] = rows_aligned(q, 16, runtime)
        for name in ("group", "kv_heads"):
            a[f"by_{name}"], a[f"by_{name}_shift"] = divisor(int(a[name][0]))
        self._choose_kernel(q, k, q_type, kv_type, block_table is not None)
        self._bind_visible(q, k)

    def _bind_pages(self, k: Array, block_table: Array | None) -> None:
        """Where the tokens of a sequence lie, and how many there can be."""
        a = self._arguments
        a["tokens"] = k.shape[1]
        if block_table is None:
            return
        page_size, pages = k.shape[1], block_table.shape[1]
        check_tokens(page_size * pages)
        a["tokens"], a = page_size * pages, a["pages"]
        a["count"], a["size"] = pages, page_size
        a["table"] = self._runtime.address(block_table)
        a["by_size"], a["by_size_shift"] = divisor(page_size)

    def _bind_lengths(self, lengths: Any, q: Array) -> None:
        self._arguments["lengths"], self._few[:] = 0, _ALL
        if lengths is None or self._mask is not None:
            return
        if type(lengths) is tuple:
            self._few[: len(lengths)] = lengths
            return
        self._runtime.check("lengths", lengths)
        if lengths.shape != q.shape[:1] or lengths.dtype != np.int64 or not lengths.flags.c_contiguous:
            raise ArgumentError(
                f"lengths are {lengths.dtype} {lengths.shape}: contiguous int64 [{q.shape[0]}] is needed"
            )
        self._arguments["lengths"] = self._runtime.address(lengths)

    def _bind_visible(self, q: Array, k: Array) -> None:
        """Tables for the tiles of the kernel. What other tiles had stays, as the workspaces do."""
        if self._mask is None:
            return
        heads, variant = q.shape[2], self.variant
        tiling = {"group": heads // k.shape[2], "rows": variant.rows, "step": variant.step}
        if self._tables is None or self._tables.tiling != tiling:
            self._tables = VisibleTables(self._mask, self._runtime, heads, **tiling)
            self._workspaces.append(self._tables)
        for name, address in self._tables.addresses.items():
            self._arguments["mask"][name] = address

    def _choose_kernel(self, q: Array, k: Array, q_type: str, kv_type: str, paged: bool) -> None:
        batch, queries, heads, head_dim = q.shape
        v_dim = self._records.shape[3] - partial.EXTRA
        kv_heads, rows = k.shape[2], queries * (heads // k.shape[2])
        runtime, tokens = self._runtime, Tokens(visible=self._mask is not None, paged=paged)
        kind, shared = (q_type, kv_type, head_dim, rows), runtime.shared_bytes
        variant = choose_variant(
            *kind,
            tensor_cores=self._tensor_cores,
            shared_limit=shared,
            tokens=tokens,
            latent=v_dim != head_dim,
        )
        self._kernel = runtime.kernel(variant.module, variant.expression, variant.shared_bytes)
        clustered = cluster_tokens(batch * kv_heads, rows, runtime.multiprocessors)
        other = cluster_kernel(*kind, shared, tokens) if self._clusters and clustered else None
        self._clustered = clustered if other else range(0)
        if other:  # compiled in any case: with more tokens a later step comes to it
            kernel = runtime.kernel(other.module, other.expression, other.shared_bytes)
            if int(self._tokens[0]) in self._clustered:
                variant, self._kernel = other, kernel
        tiles = kv_heads * math.ceil(rows / variant.rows)
        if tiles > MAX_GRID:
            raise ArgumentError(f"{queries} queries of {heads} heads are too many for one launch: split them")
        self.variant = variant
        resident = runtime.resident_blocks(self._kernel, variant.threads, variant.shared_bytes)
        self._merge = runtime.kernel("merge_splits", variant.merge) if variant.merge else None
        self.load = Load(
            tiles=batch * tiles,
            rows=min(variant.rows, rows),
            tokens=int(self._tokens[0]),
            head_dim=v_dim,
            step=variant.step,
            slots=min(resident, variant.blocks) * runtime.multiprocessors,
            merging=batch * tiles * merge_blocks(variant, v_dim, rows) if variant.merge else 0,
        )
        self.splits, self._steps = Splits(0, 0), -1  # none yet

    def _bind_splits(self, given: Any) -> None:
        """Choose the splits, where tokens are so many others that the choice can be another: those that
        somebody sees, in the tile that has the most."""
        tokens, tables = int(given), self._tables
        if tables is not None:
            if tables.end > tokens:
                raise ArgumentError(
                    f"queries see up to {tables.end} tokens, but k and v have {tokens}: look() at these"
                )
            tokens = tables.steps * self.variant.step
        steps = rounded_steps(tokens, self.variant.step)
        if steps != self._steps:
            splits = Splits(CLUSTER, CLUSTER)
            if not self.variant.clustered:
                splits = choose_splits(self.load._replace(tokens=tokens), self._num_splits)
            if splits != self.splits:
                self._cut(splits, self._records.shape[0])
            self._steps = steps

    def _cut(self, splits: Splits, batch: int) -> None:
        """Make the launch of so many splits."""
        a, load, variant = self._arguments, self.load, self.variant
        if not variant.clustered:
            self._reserve(splits)
        scratch, fan = a["scratch"], splits.number if self._merge else splits.fan
        scratch["fan"] = fan
        scratch["by_splits"], scratch["by_splits_shift"] = by_splits = divisor(splits.number)
        scratch["by_fan"], scratch["by_fan_shift"] = by_splits if fan == splits.number else divisor(fan)
        grid = (splits.number, load.tiles // batch, batch)
        launch = functools.partial(
            self._kernel, grid, (variant.threads,), (as_bytes(a),), shared_mem=variant.shared_bytes
        )
        if self._merge is not None and splits.number > 1:
            grid = (load.merging // load.tiles, *grid[1:])
            self.launches = launch, functools.partial(self._merge, grid, (THREADS,), (as_bytes(a),))
        else:
            self.launches = (launch,)
        self.splits = splits

    def _reserve(self, splits: Splits) -> None:
        """Workspace for the splits; it only ever grows, and with room, so that steps do not allocate.

        What was outgrown stays: a graph that was captured before still writes there.
        """
        load, runtime = self.load, self._runtime
        groups = splits.groups
        partials = load.tiles * load.rows * (splits.number + groups) if splits.number > 1 else 0
        size, counters = partials * (load.head_dim + partial.EXTRA), load.tiles * (groups + 1)
        if self._scratch.size < size:
            self._scratch = runtime.zeros(size + size // 2, np.float32)
            self._workspaces.append(self._scratch)
        if self._counters.size < counters:
            self._counters = runtime.zeros(2 * counters, np.uint32)
            self._workspaces.append(self._counters)
        a, first = self._arguments["scratch"], runtime.address(self._scratch)
        a["numerators"], a["states"] = first, first + 4 * partials * load.head_dim
        a["counters"] = runtime.address(self._counters)


def divisor(number: int) -> tuple[int, int]:
    """Multiplier and shift of a `Divisor` in kernels/cuda/attention.cuh: for 1 <= number < 2^31."""
    shift = 31 + (number - 1).bit_length()
    return -(-(1 << shift) // number), shift
