"""One run under a sanitizer, in a process of its own: see `test_sanitizers.py`, which starts it.

Usage: python sanitized.py SANITIZER WHAT, where WHAT is a kernel of faults.cu or, with a planted
fault or "clean", one of the real kernels: fma:clean, mma:no_barrier, pull:one_set, scatter:clean, ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))


from tests.emulator.faults import FAULTS, faults_source, planted
from tests.emulator.node import Node
from tests.emulator.raw_module import RawModule
from tests.emulator.runtime import EmulatorRuntime
from tests.support import verbs
from treeattn import collectives
from treeattn.attention.mask import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs
from treeattn.backends import cuda
from treeattn.backends.cuda import attention
from treeattn.backends.cuda.compile import source
from treeattn.backends.cuda.splits import Splits


def run_attention(sanitizer: str, name: str, edit: Callable[[str], str]) -> None:
    """A tiny shape, three splits in two groups, so that every barrier and the fence have their work to do.

    q lies where vectors reach it, then where they do not.
    """
    vars(attention)["choose_splits"] = lambda load, number: Splits(number, 2)
    runtime = EmulatorRuntime(seed=3, sanitizer=sanitizer, edit=edit)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 1, 4, 64)).astype(np.float16)
    room = np.zeros((1, 1, 4, 65), np.float16)
    room[..., 1:] = q
    k, v = (rng.standard_normal((1, 200, 1, 64)).astype(np.float16) for _ in "kv")
    records = np.empty((1, 4, 1, 66), np.float32)
    for query in (q, room[..., 1:]):
        verbs.attend(
            cuda,
            *(query, k, v, records),
            scale=0.125,
            num_splits=3,
            tensor_cores=name == "mma",
            runtime=runtime,
        )
    other = records.copy()
    verbs.merge(cuda, records, other, runtime=runtime)
    operator, maxima = cuda.MergeOperator(64, runtime=runtime), records[..., 0].reshape(4) + np.float32(1)
    flat = records.reshape(4, 66)
    operator.planned_rescale(flat, maxima, *operator.columns(flat)[1:])()
    out, lse = np.empty((1, 1, 4, 64), np.float32), np.empty((1, 4, 1), np.float32)
    verbs.finish(cuda, records, out, lse, runtime=runtime)
    cuda.planned_pack(records.copy(), 1.0, runtime=runtime)(out.reshape(1, 4, 1, 64), lse)
    cuda.planned_scale(lse, 0.5, runtime=runtime)()
    print("NaN" if np.isnan(out).any() else "finite")


def run_visible(sanitizer: str, name: str, edit: Callable[[str], str]) -> None:
    """Three queries with spans of their own, drafts and every rule, in three splits."""
    vars(attention)["choose_splits"] = lambda load, number: Splits(number, 2)
    runtime = EmulatorRuntime(seed=3, sanitizer=sanitizer, edit=edit)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, h, 64)).astype(np.float16) for n, h in ((3, 2), (260, 1), (260, 1)))
    visible = MaskTables(
        Rules(causal=True, window=(60, None), leading=3, softcap=9.0, alibi=(0.1, 0.0)), 1, 3
    )
    visible.update(
        *(Runs([(0, 2, 100), (300, 1, 160)]), 260, [240], [90, 320, 340]),
        mask=rng.random((1, 3, 40)) < 0.5,
        draft_positions=np.arange(40)[None],
    )
    records = np.empty((1, 2, 3, 66), np.float32)
    verbs.attend(
        cuda,
        *(q, k, v, records),
        scale=0.125,
        tables=visible,
        num_splits=3,
        tensor_cores=name == "mma_visible",
        runtime=runtime,
    )
    print("NaN" if np.isnan(records).any() else "finite")


def run_cache(sanitizer: str, name: str, edit: Callable[[str], str]) -> None:
    """Pages of 8 bits; the last one ends with its memory."""
    runtime = EmulatorRuntime(seed=3, sanitizer=sanitizer, edit=edit)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 1, 4, 64)).astype(np.float16)
    k, v = (rng.standard_normal((15, 16, 1, 64)).astype("float8_e4m3fn") for _ in "kv")
    table = np.array([[14, 2, 5, 1, 0, 7, 3], [4, 13, 9, 10, 14, -1, -1]], np.int32)
    records = np.empty((2, 4, 1, 66), np.float32)
    verbs.attend(
        cuda,
        *(q, k, v, records),
        scale=0.125,
        lengths=np.array([112, 80], np.int64),
        block_table=table,
        num_splits=2,
        k_scale=0.5,
        v_scale=2.0,
        tensor_cores=name == "mma_cache",
        runtime=runtime,
    )
    print("NaN" if np.isnan(records).any() else "finite")


def run_latent(sanitizer: str, name: str, edit: Callable[[str], str]) -> None:
    """Two queries of two heads; all tokens, then those in a window, and pages."""
    vars(attention)["choose_splits"] = lambda load, number: Splits(number, 2)
    runtime = EmulatorRuntime(seed=3, sanitizer=sanitizer, edit=edit)
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, n, h, 576)).astype(np.float16) for n, h in ((2, 2), (160, 1)))
    visible = MaskTables(Rules(causal=True, window=(40, None)), 1, 2)
    visible.update(Runs([(0, 1, 160)]), 160, None, [60, 130])
    table = np.array([[4, 1, 3, 0, 2]], np.int32)
    records = np.empty((3, 1, 2, 2, 514), np.float32)
    for into, keys, given in zip(
        *(records, (k, k, k.reshape(5, 32, 1, 576))),
        ({}, {"tables": visible}, {"block_table": table}),
        strict=True,
    ):
        verbs.attend(
            cuda,
            *(q, keys, keys[..., :512], into),
            scale=0.1,
            num_splits=2,
            runtime=runtime,
            **given,
        )
    print("NaN" if np.isnan(records).any() else "finite")


def run_apart(sanitizer: str, name: str, edit: Callable[[str], str]) -> None:
    """Two latent heads in more splits than a warp has lanes, most of them empty."""
    runtime = EmulatorRuntime(seed=3, sanitizer=sanitizer, edit=edit)
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, n, h, 576)).astype(np.float16) for n, h in ((1, 2), (70, 1)))
    records = np.empty((1, 2, 1, 514), np.float32)
    verbs.attend(cuda, q, k, k[..., :512], records, scale=0.1, num_splits=41, runtime=runtime)
    print("NaN" if np.isnan(records).any() else "finite")


def run_many_latent(sanitizer: str, name: str, edit: Callable[[str], str]) -> None:
    """Two tiles of rows, of which the second is nearly empty; in one split, since the merge of two would be
    more blocks than run under ThreadSanitizer."""
    runtime = EmulatorRuntime(seed=3, sanitizer=sanitizer, edit=edit)
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, n, 1, 576)).astype(np.float16) for n in (66, 100))
    records = np.empty((1, 1, 66, 514), np.float32)
    verbs.attend(cuda, q, k, k[..., :512], records, scale=0.1, num_splits=1, runtime=runtime)
    print("NaN" if np.isnan(records).any() else "finite")


def run_tall(sanitizer: str, name: str, edit: Callable[[str], str]) -> None:
    """Three splits of a tile of 41 rows."""
    vars(attention)["choose_splits"] = lambda load, number: Splits(number, 2)
    runtime = EmulatorRuntime(seed=3, sanitizer=sanitizer, edit=edit)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 1, 64)).astype(np.float16) for n in (41, 200, 200))
    records = np.empty((1, 1, 41, 66), np.float32)
    verbs.attend(cuda, q, k, v, records, scale=0.125, num_splits=3, runtime=runtime)
    print("NaN" if np.isnan(records).any() else "finite")


def run_pull(sanitizer: str, name: str, edit: Callable[[str], str]) -> None:
    """Three ranks, five steps: the slots of a step are used again two steps later; results are finished.
    "scatter": a rank whose result counts nobody, for want of records. "nodes": messages from another node."""
    scheme, records = ("head_scatter", 2) if name == "scatter" else ("all_gather_merge", 4)
    partials = np.random.default_rng(0).standard_normal((5, 3, records, 10)).astype(np.float32)
    partials[..., 1] = np.abs(partials[..., 1])
    nodes = ((0, 1), (2,)) if name == "nodes" else None
    planned = {"nodes": nodes, "finish": name == "pull", "sanitizer": sanitizer, "edit": edit}
    with Node(collectives.build(scheme, 3), records, 8, **planned) as node:
        held = [*node.run(list(partials))[-1], *(out for out, _ in node.results)]
    print("NaN" if any(np.isnan(array).any() for array in held) else "finite")


def run_fault(sanitizer: str, name: str) -> None:
    """A kernel of faults.cu with 64 threads and room for as many floats.

    Of two arrays the lower: what guards an array's end is the one above it, and the last has none.
    """
    code = source("partial_attention") + faults_source()
    x = min((np.zeros(64, np.float32), np.zeros(64, np.float32)), key=lambda array: array.ctypes.data)
    module = RawModule(code, name_expressions=(name,), sanitizer=sanitizer)
    module.get_function(name)((1,), (64,), (x,), shared_mem=256, workers=1)


def main() -> None:
    sanitizer, what = sys.argv[1:]
    kernel, _, fault = what.partition(":")
    if not fault:
        run_fault(sanitizer, what)
    else:
        way = kernel.removeprefix("fma").removeprefix("mma")
        runs = {"": run_attention, "_visible": run_visible, "_cache": run_cache}
        runs |= {"latent": run_latent, "many_latent": run_many_latent, "apart": run_apart, "tall": run_tall}
        run = runs.get(way, run_pull)
        run(sanitizer, kernel, str if fault == "clean" else planted(FAULTS[fault]))


if __name__ == "__main__":
    main()
