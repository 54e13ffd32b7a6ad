"""What kernels are given so that planted faults show, in values and to sanitizers, for which it is little.

Each kind of work is called with a runtime and the kernel, "fma" or "mma"; it returns the records of its last
launches.
"""

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
    runtime: EmulatorRuntime, q: Array, v_dim: int, splits: int | None, kernel: str = "mma", **options: Any
) -> tuple[Any, Array]:
    """A plan for q and the records that it writes."""
    batch, queries, heads, _ = q.shape
    records = np.full((batch, heads, queries, v_dim + 2), 77, np.float32)
    options = {"scale": 0.125, "num_splits": splits, "tensor_cores": kernel == "mma", **options}
    return cuda.PlannedAttention(records, runtime=runtime, **options), records


def plain(runtime: EmulatorRuntime, kernel: str) -> Array:
    """Two launches of one plan: what the first one leaves behind is nothing for the second one. q lies where
    vectors reach it, then where they do not."""
    room, k, v = drawn((1, 1, 4, 65), *((1, 200, 1, 64),) * 2)
    attend, records = planned(runtime, room[..., 1:], 64, 3, kernel)
    for q, values in ((room[..., 1:].copy(), k), (room[..., 1:], v)):
        records[:] = 77
        attend(q, k, values)
    return records


def tables(runtime: EmulatorRuntime, kernel: str) -> Array:
    """Queries at places of their own, runs, drafts and every rule. What nobody sees is NaN."""
    rules = Rules(causal=True, window=(60, None), leading=3, softcap=9.0, alibi=(0.1, 0.0))
    mask = np.random.default_rng(0).random((1, 3, 40)) < 0.5
    q, k, v = drawn((1, 3, 2, 64), *((1, 260, 1, 64),) * 2)
    visible = MaskTables(rules, 1, 3)
    attend, records = planned(runtime, q, 64, 3, kernel, tables=visible)
    at = {"mask": mask, "draft_positions": np.full((1, 40), 2000)}
    visible.update(Runs([(0, 2, 100), (300, 1, 160)]), 260, [240], [[90, 320, 340]], **at)
    attend(q, hide(visible, mask, k), hide(visible, mask, v))
    return records


def hide(visible: MaskTables, mask: Array, array: Array) -> Array:
    """A copy with NaN in tokens that nobody sees."""
    seen = np.zeros(array.shape[:2], bool)
    for b, queries in enumerate(visible.intervals.tolist()):
        for first, first_end, second, second_end in queries:
            seen[b, first:first_end] = seen[b, second:second_end] = True
        begin = visible.draft_begins[b]
        seen[b, begin : begin + visible.drafts] = mask[b].any(axis=0)
    return np.where(seen[:, :, None, None], array, array.dtype.type(np.nan))


def cache(runtime: EmulatorRuntime, kernel: str) -> Array:
    """Pages of 8 bits, of which the last one ends with its memory."""
    (q,), (k, v) = drawn((2, 1, 4, 64)), drawn(*((15, 16, 1, 64),) * 2, dtype="float8_e4m3fn")
    table = np.array([[14, 2, 5, 1, 0, 7, 3], [4, 13, 9, 10, 14, -1, -1]], np.int32)
    attend, records = planned(runtime, q, 64, 2, kernel, k_scale=[0.5], v_scale=[2.0])
    attend(q, k, v, np.array([112, 80]), table)
    return records


def finished(runtime: EmulatorRuntime, kernel: str) -> Array:
    """Results, by the launch that makes the records, of splits that are many tiles long."""
    q, k, v = drawn((1, 2, 2, 64), *((1, 330, 1, 64),) * 2)
    attend, records = planned(runtime, q, 64, 2, kernel)
    out, lse = np.full(q.shape, 77, np.float32), np.full((1, 2, 2), 77, np.float32)
    attend(q, k, v, finish=cuda.planned_finish(records, out, lse, runtime=runtime))
    return np.concatenate([out.ravel(), lse.ravel()])


def latent(runtime: EmulatorRuntime, kernel: str) -> Array:
    """A latent head: all tokens, then what queries see of them, and pages."""
    q, k = drawn((1, 2, 2, 576), (1, 160, 1, 576))
    visible = MaskTables(Rules(causal=True, window=(40, None)), 1, 2)
    visible.update(Runs([(0, 1, 160)]), 160, None, [60, 130])
    table, found = np.array([[4, 1, 3, 0, 2]], np.int32), []
    pages = k.reshape(5, 32, 1, 576)
    for keys, options, given in ((k, {}, ()), (k, {"tables": visible}, ()), (pages, {}, (None, table))):
        attend, records = planned(runtime, q, 512, 2, scale=0.1, **options)
        attend(q, keys, keys[..., :512], *given)
        found.append(records)
    return np.array(found)


def clusters(runtime: EmulatorRuntime, kernel: str) -> Array:
    """Splits that are the blocks of a cluster, of a device that has room for it. Four have no tokens."""
    runtime.multiprocessors = 16
    q, k, v = drawn((1, 1, 4, 64), *((1, 600, 1, 64),) * 2)
    attend, records = planned(runtime, q, 64, None)
    attend(q, k, v, np.array([500]))
    assert attend.variant.clustered
    return records


def many(runtime: EmulatorRuntime, kernel: str) -> Array:
    """Rows of more than one tile, over all tokens, then over what each sees."""
    q, k, v = drawn((1, 66, 1, 64), *((1, 300, 1, 64),) * 2)
    visible, found = MaskTables(Rules(causal=True, window=(150, None)), 1, 66), []
    visible.update(Runs([(0, 1, 300)]), 300, None, [np.arange(234, 300) - 40])
    for options in ({}, {"tables": visible}):
        attend, records = planned(runtime, q, 64, 2, **options)
        attend(q, k, v)
        found.append(records)
    return np.array(found)


def once(*q: int, tokens: int, splits: int) -> Callable[[EmulatorRuntime, str], Array]:
    """One launch over one head of keys, latent where q has their width."""

    def attend(runtime: EmulatorRuntime, kernel: str) -> Array:
        query, k, v = drawn(q, *((1, tokens, 1, q[3]),) * 2)
        values = k[..., :512] if q[3] == 576 else v
        launch, records = planned(runtime, query, values.shape[3], splits, scale=0.1)
        launch(query, k, values)
        return records

    return attend


WORK: dict[str, Callable[[EmulatorRuntime, str], Array]] = {
    "plain": plain,
    "tables": tables,
    "cache": cache,
    "finished": finished,
    "latent": latent,
    "many": many,
    "clusters": clusters,
    "tall": once(1, 41, 1, 64, tokens=200, splits=3),  # a tile of many rows
    "apart": once(1, 1, 2, 576, tokens=70, splits=41),  # splits beyond lanes, most of them empty
    # A tile of many rows and what is left of another; more splits do not run under ThreadSanitizer.
    "many_latent": once(1, 66, 1, 576, tokens=100, splits=1),
}
