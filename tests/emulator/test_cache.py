"""Caches of 8 bits, and caches in pages, on the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import treeattn
from tests.support import verbs
from tests.support.pages import in_pages
from treeattn.backends import cuda
from treeattn.backends.cuda import cupy_runtime
from treeattn.backends.cuda.variants import TYPES_8
from treeattn.errors import ArgumentError

from .raw_module import compiler_problem
from .runtime import EmulatorRuntime

Array = np.ndarray[Any, Any]
needs_emulator = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))


def attend(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """Records, in three splits unless another number is asked for."""
    batch, queries, heads, head_dim = q.shape
    records = np.full((batch, heads, queries, head_dim + 2), 77, np.float32)
    options = {"scale": head_dim**-0.5, "num_splits": 3, "runtime": EmulatorRuntime(seed=1), **options}
    verbs.attend(cuda, q, k, v, records, **options)
    return records


def bits(array: Array) -> Array:
    return array.view(np.uint32)


def same(first: Array, second: Array) -> bool:
    return bool((bits(first) == bits(second)).all())


def arrays(kind: Any, head_dim: int, group: int, queries: int = 1, q_kind: Any = None) -> tuple[Array, ...]:
    """q, k and v of two sequences, two KV heads and 150 tokens."""
    rng = np.random.default_rng(head_dim)
    q = rng.standard_normal((2, queries, 2 * group, head_dim)).astype(q_kind or kind)
    return q, *(rng.standard_normal((2, 150, 2, head_dim)).astype(kind) for _ in "kv")


@needs_emulator
@pytest.mark.parametrize("kind", TYPES_8)
def test_decode_takes_caches_of_8_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, or as uint8; as on the processor, but that tensor cores round weights to 16 bits."""
    monkeypatch.setattr(cupy_runtime, "current", lambda: EmulatorRuntime())
    q, k, v = arrays(kind, 64, 8, q_kind=np.float16)
    scales = {"k_scale": [0.5, 2.0], "v_scale": 3.0}
    wanted, lse = (array.copy() for array in treeattn.decode(q, treeattn.Shard(k, v, **scales)))
    for keys, values, named in ((k, v, None), (k.view(np.uint8), v.view(np.uint8), kind)):
        out, found = treeattn.decode(q, treeattn.Shard(keys, values, dtype=named, **scales), device="cuda")
        np.testing.assert_allclose(out, wanted, rtol=0, atol=4e-3 * 3 * np.abs(v.astype(float)).max())
        np.testing.assert_allclose(found, lse, rtol=0, atol=1e-5)


@needs_emulator
def test_a_plan_follows_its_block_table() -> None:
    """In place, as a serving engine writes it, also within a captured graph; and another one."""
    q, k, v = arrays(np.float32, 64, 1)
    (pages, table), (values, _) = in_pages(k, 16), in_pages(v, 16)
    records, runtime = np.zeros((2, 2, 1, 66), np.float32), EmulatorRuntime()
    lengths = np.array([150, 111], np.int64)
    planned = cuda.PlannedAttention(records, scale=0.125, num_splits=3, runtime=runtime)
    planned(q, pages, values, lengths, table)
    graph = runtime.capture(lambda: planned(q, pages, values, lengths, table))
    first = records.copy()
    swapped = table[::-1].copy()
    wanted = attend(q, pages, values, lengths=lengths, block_table=swapped)
    assert not same(first, wanted)
    with pytest.raises(ArgumentError, match="the block table is int64"):
        planned(q, pages, values, lengths, swapped.astype(np.int64))
    for change in (lambda: planned(q, pages, values, lengths, swapped), graph):
        table[...] = swapped
        change()
        assert same(records, wanted)
        records[...] = 0


PAGES = np.zeros((5, 16, 2, 64), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": PAGES.astype("float8_e5m2"), "v": PAGES.astype("float8_e5m2")}, "needs k_scale and v_scale"),
        ({"k_scale": 1.0}, "are for caches of 8 bits, not of float32"),
        ({"kv_dtype": "int8"}, "kv_dtype 'int8' is unknown: use one of .*, float8_e4m3fn, float8_e5m2"),
        ({"k": PAGES.astype(np.uint8), "v": PAGES.astype(np.uint8)}, "k is uint8: on the GPU"),
        (
            {x: PAGES.astype("float8_e5m2") for x in "kv"} | {"k_scale": [1.0] * 3, "v_scale": 1.0},
            r"k_scale has shape \[3\]: one number, or \[2\]",
        ),
        ({"k_scale": np.nan}, "k_scale must be a finite number"),
        ({"v_scale": "x"}, "v_scale must be a finite number"),
        ({"q": np.zeros((1, 1, 2, 64), "float8_e5m2")}, "q is float8_e5m2"),
        ({"block_table": np.zeros((2, 3), np.int32)}, r"contiguous int32 \[batch, pages\] = \[1, any\]"),
        ({"block_table": np.zeros((1, 3), np.int64)}, "the block table is int64"),
        ({"block_table": [[0]]}, "block_table is a list"),
        (
            {"k": PAGES[:, :0], "v": PAGES[:, :0]},
            r"must be \[pages, page_size, kv_heads, head_dim\]",
        ),
        ({"q": np.zeros((2, 1, 2, 64), np.float32)}, r"\[1, 3\]: contiguous int32 .* \[2, any\]"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "q": np.zeros((1, 1, 2, 64), np.float32),
        "k": PAGES,
        "v": PAGES,
        "block_table": np.zeros((1, 3), np.int32),
    }
    with pytest.raises(ArgumentError, match=message):
        attend(**{**given, **change})
