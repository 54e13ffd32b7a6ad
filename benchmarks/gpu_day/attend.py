"""The launches that the sanitizers and Nsight Compute look at: python -m gpu_day.attend small|large

small: cases as in the tests' table, of each kernel and of each way to read a cache, held to the float64
oracle, and a reduction over peer memory, held to its definition; without CuPy's pool, where an overrun meets
the next array and nobody sees it.
large: `LARGE`, one launch each.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, NamedTuple

import numpy as np

from gpu_day.streams import Ranks
from tests.emulator.cases import Case, is_tensor_core_case
from treeattn import collectives
from treeattn.backends import cpu, cuda
from treeattn.backends.cuda import cupy_runtime
from treeattn.collectives.executors import loopback
from treeattn.study.roofline.cuda import upload_random

Array = np.ndarray[Any, Any]

HEAD_DIM = 128
SMALL = (
    Case("bfloat16", HEAD_DIM, tokens=300, splits=3),
    Case("bfloat16", HEAD_DIM, group=4, tokens=300, splits=3),
    Case("bfloat16", 576, group=16, kv_heads=1, tokens=150, splits=2, v_dim=512),  # latent
    Case("bfloat16", 576, group=70, kv_heads=1, tokens=100, splits=2, v_dim=512),  # by eight warps
    Case("float16", HEAD_DIM, group=4, queries=12, kv_heads=1, tokens=200, splits=2),  # many rows
    Case("float16", 64, group=2, queries=6, tokens=200, drafts=6, splits=2),  # a token tree
    Case("bfloat16", 256, group=4, queries=3, tokens=200, window=(90, None), softcap=20.0),
)


class Shape(NamedTuple):
    """One query of one sequence, bfloat16."""

    heads: int
    kv_heads: int
    tokens: int


LARGE = tuple(Shape(*heads, tokens) for tokens in (65536, 8192) for heads in ((16, 16), (32, 8)))


class Results(NamedTuple):
    """On the host, as `treeattn.partial` has them."""

    records: Array
    out: Array
    lse: Array


def attend(runtime: Any, case: Case) -> Results:
    """Attention over a case's arrays, and the finish; in one split where the case leaves that open."""
    *arrays, tables = case.inputs()
    q, k, v, lengths = (_uploaded(runtime, array) for array in arrays)
    v = k[..., : case.v_dim] if case.v_dim else v
    records = runtime.empty((case.batch, case.heads, case.queries, case.width + 2), np.float32)
    out = runtime.empty((case.batch, case.queries, case.heads, case.width), np.float32)
    lse = runtime.empty((case.batch, case.heads, case.queries), np.float32)
    attention = cuda.PlannedAttention(
        records, scale=case.scale, tables=tables, num_splits=case.splits or 1,
        tensor_cores=case.tensor_cores, runtime=runtime,
    )  # fmt: skip
    attention(q, k, v, lengths)
    cuda.planned_finish(records, out, lse, runtime=runtime)()
    runtime.synchronize()
    return Results(*(array.get() if hasattr(array, "get") else array for array in (records, out, lse)))


def _uploaded(runtime: Any, array: Array | None) -> Any:
    """On the device, contiguous; bfloat16 as its bits."""
    if array is None:
        return None
    plain = np.ascontiguousarray(array.view(np.uint16) if array.dtype.name == "bfloat16" else array)
    there = runtime.empty(plain.shape, plain.dtype)
    if plain.size:
        runtime.upload(there, plain)
    return there


def launch(runtime: Any, shape: Shape) -> None:
    """One launch over random numbers, in as many splits as the backend chooses."""
    kind, rows = np.dtype(np.uint16), (1, shape.tokens, shape.kv_heads, HEAD_DIM)
    q = upload_random(runtime, (1, 1, shape.heads, HEAD_DIM), kind)
    k, v = (upload_random(runtime, rows, kind) for _ in "kv")
    records = runtime.empty((1, shape.heads, 1, HEAD_DIM + 2), np.float32)
    cuda.PlannedAttention(records, scale=HEAD_DIM**-0.5, runtime=runtime)(q, k, v)
    runtime.synchronize()


def pull(runtime: Any) -> None:
    """Two steps of a record of eight ranks that one of them keeps, who folds it out of the windows of all.

    Launches come one after the other, as sanitizers have them: those who keep nothing wait for nobody in the
    first steps. Raises `AssertionError` over another bit than the definition's.
    """
    schedule = collectives.build("head_scatter", 8)
    made = np.random.default_rng(0).standard_normal((2, 8, 1, HEAD_DIM + 2)).astype(np.float32)
    made[..., 1] = np.abs(made[..., 1])
    with Ranks(runtime, schedule, 1, HEAD_DIM) as ranks:
        kept = [len(range(1)[schedule.chunk_slice(schedule.promised(rank), 1)]) for rank in range(8)]
        keeper = kept.index(1)
        for partials in made:
            for rank in sorted(range(8), key=kept.__getitem__):
                runtime.upload(ranks.buffers[rank], partials[rank])
                ranks.steps[rank]()
            runtime.synchronize()
            found = ranks.buffers[keeper]
            wanted = loopback.run(schedule, list(partials), cpu.MergeOperator(HEAD_DIM))[keeper]
            np.testing.assert_array_equal(
                (found.get() if hasattr(found, "get") else found).view(np.uint32), wanted.view(np.uint32)
            )


def main(which: str) -> None:
    if which == "small" and cupy_runtime.problem() is None:
        importlib.import_module("cupy").cuda.set_allocator(None)
    runtime = cupy_runtime.current()
    if which == "large":
        for shape in LARGE:
            launch(runtime, shape)
            print(f"launched {shape}")
        return
    for case in SMALL:
        results = attend(runtime, case)
        case.check(results.out, results.lse, is_tensor_core_case(case))
        print(f"{case}: within the promised bounds")
    pull(runtime)
    print("a reduction over peer memory has the bits of the definition")


if __name__ == "__main__":
    main(*sys.argv[1:])
