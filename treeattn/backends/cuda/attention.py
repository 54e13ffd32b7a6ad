"""Partial attention on an NVIDIA GPU: which kernel, in how many splits, launched without allocating."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from treeattn import partial
from treeattn.attention.shape import check_shapes
from treeattn.backends.cuda.runtime import THREADS, Runtime, check_records, default_runtime, structure
from treeattn.backends.cuda.splits import MAX_SPLITS, Load, Splits, choose_splits, rounded_steps
from treeattn.backends.cuda.variants import TYPES, Variant, check_head_dim, choose_variant
from treeattn.errors import ArgumentError

__all__ = ["PlannedAttention", "check_rows", "partial_attention"]

_MAX_GRID = 65535  # blocks along the second and third axis of a grid
_MAX_TOKENS = 2**31 - 64  # positions of tokens are 32-bit integers, a step beyond the last one too

# AttentionArguments of kernels/cuda/attention.cuh.
_ATTENTION = structure(
    "q k v lengths mask records numerators states counters",
    "q_batch_stride q_query_stride q_head_stride k_batch_stride k_token_stride k_head_stride "
    "v_batch_stride v_token_stride v_head_stride mask_batch_stride",
    "tokens queries heads kv_heads group mask_words mask_tokens fan q_type q_aligned",
    "scale",
    unsigned="by_group by_group_shift by_kv_heads by_kv_heads_shift "
    "by_splits by_splits_shift by_fan by_fan_shift",
)


def partial_attention(
    q: Any,
    k: Any,
    v: Any,
    records: Any,
    *,
    scale: float,
    lengths: Any = None,
    mask: Any = None,
    mask_tokens: int = 0,
    num_splits: int | None = None,
    tensor_cores: bool = True,
    runtime: Runtime | None = None,
) -> None:
    """Write the records of every query head attending to this device's tokens.

    Args:
        q: [batch, queries, heads, head_dim].
        k, v: [batch, tokens, kv_heads, head_dim], any strides that keep rows aligned to 16 bytes, the
            last axis contiguous; tokens may be 0.
        records: written, C-contiguous [batch, heads, queries, head_dim + 2], float32.
        scale: factor of the logits, usually 1 / sqrt(head_dim).
        lengths: [batch] int64 on the device, the valid tokens, read at launch and clamped to
            0..tokens (the host cannot look without waiting); None means all.
        mask: [batch, queries, words] uint64 on the device: bit j % 64 of word j // 64 says whether a query
            sees the j-th of the last `mask_tokens` valid tokens; earlier ones are seen. None: all are.
        mask_tokens: how many tokens the mask speaks of.
        num_splits: in how many splits to cut the tokens, 1..MAX_SPLITS; None chooses by `choose_splits`.
        tensor_cores: may probabilities be held in 16 bits, for speed? Then |out - exact| can reach
            4e-3 * max|v|. Only used with 16-bit inputs of one type and 4 or more rows for each KV head.
        runtime: the device; None is CuPy's current one.

    Inputs are float32, float16, bfloat16 or uint16 (the bits of bfloat16).

    Raises:
        ArgumentError: shapes, types, strides or devices that cannot be.
        BackendError: no GPU or no CuPy, a head_dim without a kernel.
    """
    planned = PlannedAttention(
        records, scale=scale, num_splits=num_splits, tensor_cores=tensor_cores, runtime=runtime
    )
    planned(q, k, v, lengths, mask=mask, mask_tokens=mask_tokens)


class PlannedAttention:
    """`partial_attention` into records that stay where they are.

    Calling it with the arrays of the last call (the same objects) is one launch: nothing is derived,
    allocated or waited for. It keeps references to them and to its workspace until the next call.
    """

    def __init__(
        self,
        records: Any,
        *,
        scale: float,
        num_splits: int | None = None,
        tensor_cores: bool = True,
        runtime: Runtime | None = None,
    ) -> None:
        """Plan for `records` and the options as in `partial_attention`."""
        self._runtime = runtime = runtime or default_runtime()
        check_records(records, runtime)
        if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
            raise ArgumentError(f"num_splits = {num_splits}: it must be 1..{MAX_SPLITS}")
        self._records = records
        self._num_splits = num_splits
        self._tensor_cores = tensor_cores and runtime.tensor_cores
        self._arguments = np.zeros(1, _ATTENTION)
        self._arguments["scale"] = scale
        self._arguments["records"] = runtime.address(records)
        self._addresses = self._arguments.view(np.uint64)  # q, k and v come first
        self._tokens = self._arguments["tokens"]
        self._scratch = runtime.zeros(0, np.float32)
        self._counters = runtime.zeros(0, np.uint32)
        self._workspaces: list[Any] = []
        self._bound: tuple[Any, ...] = ()
        self._layout: tuple[Any, ...] = ()
        self._mask_tokens = 0
        self._variant: Variant
        #: What the last arrays ask for, and into how many splits it is cut.
        self.load: Load
        self.splits: Splits
        self._steps: int
        self._launch: Callable[[], object]

    def __call__(
        self, q: Any, k: Any, v: Any, lengths: Any = None, *, mask: Any = None, mask_tokens: int = 0
    ) -> None:
        """As `partial_attention`."""
        bound, given = self._bound, (q, k, v, lengths, mask)
        if not bound or any(map(operator.is_not, bound, given)) or mask_tokens != self._mask_tokens:
            self.bind(*given, mask_tokens)
        self._launch()

    def bind(
        self, q: Any, k: Any, v: Any, lengths: Any = None, mask: Any = None, mask_tokens: int = 0
    ) -> None:
        """What a call does before it launches, when it is given other arrays than the last one.

        Arrays laid out as the last ones, but for the number of tokens, cost their addresses.
        """
        runtime, bound = self._runtime, self._bound
        self._bound = ()
        for name, array in (("q", q), ("k", k), ("v", v)):
            runtime.check(name, array)
        places = runtime.address(q), runtime.address(k), runtime.address(v)
        layout = (places[0] % 16, *_layout(q, k, v))
        if bound and layout == self._layout and mask is bound[4] and mask_tokens == self._mask_tokens:
            if (places[1] | places[2]) % 16:
                check_rows("k", k, runtime)
                check_rows("v", v, runtime)
            _check_tokens(k)
            self._tokens[0] = k.shape[1]
            if lengths is not bound[3]:
                self._bind_lengths(lengths, k)
        else:
            self._bind_layout(q, k, v, mask, mask_tokens)
            self._bind_lengths(lengths, k)
        for place, address in enumerate(places):
            self._addresses[place] = address
        self._bind_splits(k)
        self._bound, self._layout, self._mask_tokens = (q, k, v, lengths, mask), layout, mask_tokens

    def _bind_layout(self, q: Any, k: Any, v: Any, mask: Any, mask_tokens: int) -> None:
        """All but addresses, lengths and splits."""
        runtime, a = self._runtime, self._arguments
        q_type, kv_type = _check_inputs(q, k, v, self._records, runtime)
        for name, array in (("q", q), ("k", k), ("v", v)):
            axes = ("batch", "query" if name == "q" else "token", "head")
            for axis, stride in zip(axes, array.strides[:3], strict=True):
                a[f"{name}_{axis}_stride"] = stride // (1 if name == "q" else array.dtype.itemsize)
        a["queries"], a["heads"] = q.shape[1:3]
        a["tokens"], a["kv_heads"] = k.shape[1:3]
        a["group"] = q.shape[2] // k.shape[2]
        a["q_type"] = TYPES[q.dtype.name][1]
        a["q_aligned"] = _rows_aligned(q, 16, runtime)
        for name in ("group", "kv_heads"):
            a[f"by_{name}"], a[f"by_{name}_shift"] = divisor(int(a[name][0]))
        self._bind_mask(mask, mask_tokens, q)
        self._choose_kernel(q, k, q_type, kv_type)

    def _bind_lengths(self, lengths: Any, k: Any) -> None:
        self._arguments["lengths"] = 0
        if lengths is None:
            return
        self._runtime.check("lengths", lengths)
        if lengths.shape != k.shape[:1] or lengths.dtype != np.int64 or not lengths.flags.c_contiguous:
            raise ArgumentError(
                f"lengths are {lengths.dtype} {lengths.shape}: contiguous int64 [{k.shape[0]}] is needed"
            )
        self._arguments["lengths"] = self._runtime.address(lengths)

    def _bind_mask(self, mask: Any, mask_tokens: int, q: Any) -> None:
        a = self._arguments
        a["mask"] = a["mask_words"] = a["mask_tokens"] = a["mask_batch_stride"] = 0
        if mask is None:
            return
        self._runtime.check("mask", mask)
        if mask.ndim != 3 or mask.shape[:2] != q.shape[:2] or mask.dtype != np.uint64:
            raise ArgumentError(
                f"the mask is {mask.dtype} {mask.shape}: uint64 [batch, queries, words] = "
                f"[{q.shape[0]}, {q.shape[1]}, any] is needed"
            )
        if not mask.flags.c_contiguous or not 0 <= mask_tokens <= 64 * mask.shape[2]:
            raise ArgumentError(
                f"mask_tokens = {mask_tokens}: a C-contiguous mask of {mask.shape[2]} words holds 64 each"
            )
        a["mask"] = self._runtime.address(mask)
        a["mask_words"], a["mask_tokens"] = mask.shape[2], mask_tokens
        a["mask_batch_stride"] = mask.shape[1] * mask.shape[2]

    def _choose_kernel(self, q: Any, k: Any, q_type: str, kv_type: str) -> None:
        batch, queries, heads, head_dim = q.shape
        kv_heads, rows = k.shape[2], queries * (heads // k.shape[2])
        runtime = self._runtime
        variant = choose_variant(
            *(q_type, kv_type, head_dim, rows),
            tensor_cores=self._tensor_cores,
            shared_limit=runtime.shared_bytes,
        )
        tiles = kv_heads * math.ceil(rows / variant.rows)
        if tiles > _MAX_GRID:
            raise ArgumentError(f"{queries} queries of {heads} heads are too many for one launch: split them")
        self._variant = variant
        self._kernel = runtime.kernel(variant.module, variant.expression, variant.shared_bytes)
        resident = runtime.resident_blocks(self._kernel, THREADS, variant.shared_bytes)
        self.load = Load(
            tiles=batch * tiles,
            rows=min(variant.rows, rows),
            tokens=k.shape[1],
            head_dim=head_dim,
            token_bytes=2 * head_dim * k.dtype.itemsize,
            step=variant.step,
            in_flight=variant.in_flight,
            slots=resident * runtime.multiprocessors,
            multiprocessors=runtime.multiprocessors,
        )
        self.splits, self._steps = Splits(0, 0), -1  # none yet

    def _bind_splits(self, k: Any) -> None:
        """Choose the splits, where tokens are so many others that the choice can be another."""
        steps = rounded_steps(k.shape[1], self._variant.step)
        if steps != self._steps:
            splits = choose_splits(self.load._replace(tokens=k.shape[1]), self._num_splits)
            if splits != self.splits:
                self._cut(splits, k.shape[0])
            self._steps = steps

    def _cut(self, splits: Splits, batch: int) -> None:
        """Make the launch of so many splits."""
        a, shared = self._arguments, self._variant.shared_bytes
        self._reserve(splits)
        a["fan"] = splits.fan
        a["by_splits"], a["by_splits_shift"] = divisor(splits.number)
        a["by_fan"], a["by_fan_shift"] = divisor(splits.fan)
        grid = (splits.number, self.load.tiles // batch, batch)
        self._launch = functools.partial(self._kernel, grid, (THREADS,), (a,), shared_mem=shared)
        self.splits = splits

    def _reserve(self, splits: Splits) -> None:
        """Workspace for the splits; it only ever grows, and with room, so that steps do not allocate.

        What was outgrown stays: a graph that was captured before still writes there.
        """
        load, runtime = self.load, self._runtime
        partials = load.tiles * load.rows * (splits.number + splits.groups) if splits.number > 1 else 0
        size, counters = partials * (load.head_dim + partial.EXTRA), load.tiles * (splits.groups + 1)
        if self._scratch.size < size:
            self._scratch = runtime.zeros(size + size // 2, np.float32)
            self._workspaces.append(self._scratch)
        if self._counters.size < counters:
            self._counters = runtime.zeros(2 * counters, np.uint32)
            self._workspaces.append(self._counters)
        a, first = self._arguments, runtime.address(self._scratch)
        a["numerators"], a["states"] = first, first + 4 * partials * load.head_dim
        a["counters"] = runtime.address(self._counters)


def divisor(number: int) -> tuple[int, int]:
    """Multiplier and shift of a `Divisor` in kernels/cuda/attention.cuh: for 1 <= number < 2^31."""
    shift = 31 + (number - 1).bit_length()
    return -(-(1 << shift) // number), shift


def _layout(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """What decides kernel and strides; of the number of tokens only whether their stride counts."""
    k_shape, v_shape = k.shape, v.shape
    return (
        *(q.shape, q.strides, q.dtype, k.strides, k.dtype, v.strides, v.dtype),
        *(len(k_shape), k_shape[:1], k_shape[2:], min(k_shape[1:2], (2,)), k_shape == v_shape),
    )


def _check_inputs(q: Any, k: Any, v: Any, records: Any, runtime: Runtime) -> tuple[str, str]:
    """C++ types of q and of k, v; an error if anything does not fit."""
    batch, head_dim = records.shape[0], records.shape[3] - partial.EXTRA
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.dtype.name not in TYPES:
            raise ArgumentError(
                f"{name} is {array.dtype}: on the GPU it must be float32, float16 or bfloat16 "
                "(as uint16 bits); float64 is for device='cpu'"
            )
    check_head_dim(head_dim)
    check_shapes(q, k, v, records)
    if q.shape[3] != head_dim:
        raise ArgumentError(f"values of {head_dim} channels for keys of {q.shape[3]} are for device='cpu'")
    if batch > _MAX_GRID:
        raise ArgumentError(f"batch {batch}: at most {_MAX_GRID} fits one launch")
    _check_tokens(k)
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_rows(name, array, runtime)
    return TYPES[q.dtype.name][0], TYPES[k.dtype.name][0]


def _check_tokens(k: Any) -> None:
    if k.shape[1] >= _MAX_TOKENS:
        raise ArgumentError(f"{k.shape[1]} tokens: fewer than {_MAX_TOKENS} fit one launch")


def check_rows(name: str, array: Any, runtime: Runtime) -> None:
    """Raise `ArgumentError` unless rows of head_dim can be loaded: those of k and v 16 bytes at a time."""
    if array.size == 0:
        return
    if array.strides[3] != array.dtype.itemsize:
        raise ArgumentError(f"the last axis of {name} must be contiguous: copy it with ascontiguousarray")
    bytes_ = array.dtype.itemsize if name == "q" else 16
    if not _rows_aligned(array, bytes_, runtime):
        raise ArgumentError(
            f"rows of {name} must begin at multiples of {bytes_} bytes: strides are {array.strides} bytes; "
            "copy it with ascontiguousarray"
        )


def _rows_aligned(array: Any, multiple: int, runtime: Runtime) -> bool:
    """Whether rows begin at multiples of so many bytes."""
    strides = [stride for stride, size in zip(array.strides[:3], array.shape[:3], strict=True) if size > 1]
    return not any(at % multiple for at in (runtime.address(array), *strides))
