"""What kernels are given so that planted faults show: small for sanitizers, or enough for values to change.

Each kind of work is called with a runtime, the kernel, "fma" or "mma", and whether it is small; it returns
the records of its last launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from treeattn.attention.arguments import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs
from treeattn.backends import cuda

from .runtime import EmulatorRuntime

Array = np.ndarray[Any, Any]


def drawn(*shapes: tuple[int, ...], dtype: str = "float16") -> list[Array]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def planned(
    runtime: EmulatorRuntime, q: Array, v_dim: int, splits: int, kernel: str = "mma", **options: Any
) -> tuple[Any, Array]:
    """A plan for q and the records that it writes."""
    batch, queries, heads, _ = q.shape
    records = np.full((batch, heads, queries, v_dim + 2), 77, np.float32)
    options = {"scale": 0.125, "num_splits": splits, "tensor_cores": kernel == "mma", **options}
    return cuda.PlannedAttention(records, runtime=runtime, **options), records


def plain(runtime: EmulatorRuntime, kernel: str, small: bool) -> Array:
    """Two launches of one plan: what the first one leaves behind is nothing for the second one. q lies where
    vectors reach it, then where they do not."""
    tokens, splits = (200, 3) if small else (1500, 24)
    room, k, v = drawn((1, 1, 4, 65), (1, tokens, 1, 64), (1, tokens, 1, 64))
    attend, records = planned(runtime, room[..., 1:], 64, splits, kernel)
    for q, values in ((room[..., 1:].copy(), k), (room[..., 1:], v)):
        records[:] = 77
        attend(q, k, values)
    return records


def tables(runtime: EmulatorRuntime, kernel: str, small: bool) -> Array:
    """One plan over other tables in turn: queries at places of their own, runs, drafts and every rule. What
    nobody sees is NaN; by multiply-add so is, in the larger work, a value that only one query sees."""
    if small:
        batch, queries, heads, kv_heads, tokens, splits = 1, 3, 2, 1, 260, 3
        rules = Rules(causal=True, window=(60, None), leading=3, softcap=9.0, alibi=(0.1, 0.0))
        runs, lengths, stands = [((0, 2, 100), (300, 1, 160))], [240], [[90, 320, 340]]
        drafts, density = 40, 0.5
    else:
        batch, queries, heads, kv_heads, tokens, splits = 2, 5, 4, 2, 1500, 5
        rules = Rules(causal=True, window=(400, None), leading=9, alibi=(0.01, 0.02, 0.0, -0.01))
        runs = [((0, 2, 700), (2000, 1, 800)), ((7, 1, 1500),), ((3, 3, 900), (4000, 1, 600))]
        lengths, stands = [1500, 1300], [[500, 560, 90, 1200, 2100], [700, 40, 720, 2200, 2210]]
        drafts, density = 70, 0.1
    rng = np.random.default_rng(0)
    q, k, v = drawn((batch, queries, heads, 64), *((batch, tokens, kv_heads, 64),) * 2)
    visible, found = MaskTables(rules, batch, queries), []
    attend, records = planned(runtime, q, 64, splits, kernel, tables=visible)
    for step in runs:
        mask = rng.random((batch, queries, drafts)) < density
        at = {"mask": mask, "draft_positions": rng.integers(2000, 2100, (batch, drafts))}
        visible.update(Runs(step), tokens, lengths, stands, **at)
        keys, values = hide(visible, mask, k), hide(visible, mask, v)
        if kernel == "fma" and not small:
            values[0, visible.intervals[0, 1, 3] - 1] = np.nan
        attend(q, keys, values)
        found.append(records.copy())
    return np.array(found)


def hide(visible: MaskTables, mask: Array, array: Array) -> Array:
    """A copy with NaN in tokens that nobody sees."""
    seen = np.zeros(array.shape[:2], bool)
    for b, queries in enumerate(visible.intervals.tolist()):
        for first, first_end, second, second_end in queries:
            seen[b, first:first_end] = seen[b, second:second_end] = True
        begin = visible.draft_begins[b]
        seen[b, begin : begin + visible.drafts] = mask[b].any(axis=0)
    return np.where(seen[:, :, None, None], array, array.dtype.type(np.nan))


def cache(runtime: EmulatorRuntime, kernel: str, small: bool) -> Array:
    """Pages of 8 bits. Small: the last one ends with its memory. Else a value is NaN, and one sequence goes
    on where it has no page."""
    pages, kv_heads, heads = (15, 1, 4) if small else (40, 2, 8)
    (q,) = drawn((2, 1, heads, 64))
    k, v = drawn(*((pages, 16, kv_heads, 64),) * 2, dtype="float8_e4m3fn")
    table = np.array([[14, 2, 5, 1, 0, 7, 3], [4, 13, 9, 10, 14, -1, -1]], np.int32)
    lengths, splits, scales = [112, 80], 2, ([0.5], [2.0])
    if not small:
        table = np.random.default_rng(0).permutation(40)[:36].astype(np.int32).reshape(2, 18)
        table[1, 15], table[0, 2] = -1, 3
        v[3, 4, 1, 5] = np.nan
        lengths, splits, scales = [288, 250], 1, ([0.5, 2.0], [3.0, 1.0])
    attend, records = planned(runtime, q, 64, splits, kernel, k_scale=scales[0], v_scale=scales[1])
    attend(q, k, v, np.array(lengths, np.int64), table)
    return records


def finished(runtime: EmulatorRuntime, kernel: str, small: bool) -> Array:
    """Results, by the launch that makes the records, of splits that are many tiles long."""
    batch, queries, heads, kv_heads, tokens = (1, 2, 2, 1, 330) if small else (2, 5, 6, 2, 1000)
    q, k, v = drawn((batch, queries, heads, 64), *((batch, tokens, kv_heads, 64),) * 2)
    attend, records = planned(runtime, q, 64, 2, kernel)
    out, lse = np.full(q.shape, 77, np.float32), np.full((batch, heads, queries), 77, np.float32)
    attend(q, k, v, finish=cuda.planned_finish(records, out, lse, runtime=runtime))
    return np.concatenate([out.ravel(), lse.ravel()])


def latent(runtime: EmulatorRuntime, kernel: str, small: bool) -> Array:
    """A latent head: all tokens, then what queries see of them, and pages."""
    queries, heads, tokens, window = (2, 2, 160, 40) if small else (5, 3, 320, 60)
    q, k = drawn((1, queries, heads, 576), (1, tokens, 1, 576))
    visible = MaskTables(Rules(causal=True, window=(window, None)), 1, queries)
    visible.update(Runs([(0, 1, tokens)]), tokens, None, [60, 130] if small else [250, 40, 90, 20, 140])
    table, found = np.array([[4, 1, 3, 0, 2]], np.int32), []
    pages = k.reshape(5, tokens // 5, 1, 576)
    for keys, options, given in ((k, {}, ()), (k, {"tables": visible}, ()), (pages, {}, (None, table))):
        attend, records = planned(runtime, q, 512, 2, scale=0.1, **options)
        attend(q, keys, keys[..., :512], *given)
        found.append(records)
    return np.array(found)


def many(runtime: EmulatorRuntime, kernel: str, small: bool) -> Array:
    """Rows of more than one tile, or of half a one, over all tokens, then over what each sees."""
    queries, tokens = (66, 300) if small else (140, 700)
    q, k, v = drawn((1, queries, 1, 64), *((1, tokens, 1, 64),) * 2)
    visible, found = MaskTables(Rules(causal=True, window=(150, None)), 1, queries), []
    visible.update(Runs([(0, 1, tokens)]), tokens, None, [np.arange(tokens - queries, tokens) - 40])
    for options in ({}, {"tables": visible}):
        attend, records = planned(runtime, q, 64, 2, **options)
        attend(q, k, v)
        found.append(records)
    return np.array(found)


def once(*q: int, tokens: int, splits: int) -> Callable[[EmulatorRuntime], Array]:
    """One launch over one head of keys, latent where q has their width."""

    def attend(runtime: EmulatorRuntime) -> Array:
        query, k, v = drawn(q, *((1, tokens, 1, q[3]),) * 2)
        values = k[..., :512] if q[3] == 576 else v
        launch, records = planned(runtime, query, values.shape[3], splits, scale=0.1)
        launch(query, k, values)
        return records

    return attend


#: Large, then small: a tile of many rows; more parts than a reader asks for at a time; splits beyond lanes,
#: most of them empty; a tile of many latent rows and what is left of another, small in one split: more do not
#: run under ThreadSanitizer.
_ONCE = {
    "tall": (once(1, 57, 1, 64, tokens=300, splits=4), once(1, 41, 1, 64, tokens=200, splits=3)),
    "parts": (once(1, 4, 4, 64, tokens=600, splits=6), once(1, 4, 4, 64, tokens=300, splits=5)),
    "apart": (once(1, 1, 4, 576, tokens=300, splits=41), once(1, 1, 2, 576, tokens=70, splits=41)),
    "many_latent": (once(1, 35, 2, 576, tokens=100, splits=3), once(1, 66, 1, 576, tokens=100, splits=1)),
}

WORK: dict[str, Callable[[EmulatorRuntime, str, bool], Array]] = {
    "plain": plain,
    "tables": tables,
    "cache": cache,
    "finished": finished,
    "latent": latent,
    "many": many,
    **{name: lambda runtime, _, small, both=both: both[small](runtime) for name, both in _ONCE.items()},
}
