"""Caches of 8 bits, and caches in pages, on the emulator."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import treeattn
from tests.support import verbs
from tests.support.drawn import sample
from tests.support.pages import in_pages
from treeattn import reference
from treeattn.attention.mask import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs
from treeattn.backends import cuda
from treeattn.backends.cuda import cupy_runtime
from treeattn.backends.cuda.variants import TYPES_8
from treeattn.errors import ArgumentError

from .raw_module import compiler_problem
from .runtime import EmulatorRuntime

Array = np.ndarray[Any, Any]
needs_emulator = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))
K_SCALES, V_SCALE = np.array([0.5, 3.0], np.float32), 0.25


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
@pytest.mark.parametrize(
    ("kind", "q_kind"), sample(1, itertools.product(TYPES_8, [np.float32, np.float16, ml_dtypes.bfloat16]))
)
def test_every_number_of_8_bits_is_widened(kind: str, q_kind: Any) -> None:
    """By multiply-add and into tiles for tensor cores. One token has the weight 1: its values come out as
    they are."""
    codes = np.arange(256, dtype=np.uint8).view(kind)
    k = np.zeros((1, 1, 1, 256), kind)
    q = np.ones((1, 1, 4, 256), q_kind)
    records = attend(q, k, codes.reshape(k.shape), k_scale=1.0, v_scale=1.0, num_splits=1)
    np.testing.assert_array_equal(records[0, 3, 0, 2:], codes.astype(np.float32))
    for code in range(0, 256, 5):  # and keys: each alone, times the one element of q that is not 0
        one = np.zeros((1, 1, 4, 256), q_kind)
        k[...], one[..., code] = 0, 1
        k[..., code] = codes[code]
        found = attend(one, k, k * 0, k_scale=2.0, v_scale=1.0, num_splits=1, scale=1.0)[0, 3, 0, 0]
        wanted = 2 * codes[code].astype(np.float32)
        assert found == wanted or (np.isnan(found) and np.isnan(wanted))


@needs_emulator
@pytest.mark.parametrize(
    ("kind", "head_dim", "group", "visible"),
    sample(2, itertools.product(TYPES_8, [64, 80, 128], [1, 8, 48], [False, True])),
)
def test_caches_of_8_bits_are_exact(kind: str, head_dim: int, group: int, visible: bool) -> None:
    """On the widened inputs."""
    q, k, v = arrays(kind, head_dim, group, 3, ml_dtypes.bfloat16)
    rules: dict[str, Any] = {}
    given: dict[str, Any] = {"lengths": np.array([150, 111], np.int64)}
    if visible:
        slopes = np.linspace(0, 0.2, 2 * group)
        look = MaskTables(
            Rules(causal=True, window=(40, None), leading=3, softcap=9.0, alibi=tuple(slopes)), 2, 3
        )
        runs, stand = Runs([(0, 2, 80), (300, 1, 70)]), np.array([[90, 140, 330]] * 2)
        look.update(runs, 150, [150, 111], stand)
        given = {"tables": look}
        seen = reference.seen(runs.positions(), stand, causal=True, window=(40, None), leading=3)
        distance = np.broadcast_to(stand[:, :, None] - runs.positions(), seen.shape)
        rules = {"seen": seen, "softcap": 9.0, "alibi": slopes, "distance": distance}
    records = attend(q, k, v, k_scale=K_SCALES, v_scale=V_SCALE, **given)
    wide = k.astype(float) * K_SCALES[:, None], v.astype(float) * V_SCALE
    part = reference.partial(q, *wide, scale=head_dim**-0.5, lengths=[150, 111], **rules)
    wanted, lse = reference.combine([part])
    bound, lse_bound = reference.error_bounds([part])
    bound = max(bound, 4e-3 * part.largest_value) if group > 1 else bound
    out = (records[..., 2:] / records[..., 1:2]).transpose(0, 2, 1, 3)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=bound)
    np.testing.assert_allclose(records[..., 0] + np.log(records[..., 1]), lse, rtol=0, atol=lse_bound)


@needs_emulator
@pytest.mark.parametrize("kind", TYPES_8)
def test_bits_are_taken_for_what_they_are_said_to_be(kind: str) -> None:
    """CuPy has no such types."""
    q, k, v = arrays(kind, 64, 1, q_kind=np.float16)
    named = attend(q, k, v, k_scale=1.0, v_scale=2.0)
    carried = attend(q, k.view(np.uint8), v.view(np.uint8), k_scale=1.0, v_scale=2.0, kv_dtype=kind)
    assert same(named, carried)


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


# Types of the cache, head dimensions, query heads of each KV head.
SHAPES = ((np.float32, 64, 1), (np.float16, 64, 4), (ml_dtypes.bfloat16, 128, 2), ("float8_e4m3fn", 128, 1))


@needs_emulator
@pytest.mark.parametrize(
    ("shape", "page_size", "limited"),
    sample(2, itertools.product(SHAPES, [1, 16, 7, 64], [False, True])),
)
def test_pages_have_the_bits_of_a_cache_in_one_piece(
    shape: tuple[Any, int, int], page_size: int, limited: bool
) -> None:
    kind, head_dim, group = shape
    is_8 = isinstance(kind, str)
    q, k, v = arrays(kind, head_dim, group, 2 if limited else 1, np.float16 if is_8 else None)
    given: dict[str, Any] = {"k_scale": K_SCALES, "v_scale": V_SCALE} if is_8 else {}
    lengths = np.array([150, 111], np.int64)
    if limited:
        given["tables"] = MaskTables(Rules(causal=True, window=(40, None), leading=3, softcap=5.0), 2, 2)
        given["tables"].update(Runs([(0, 2, 80), (300, 1, 70)]), 150, lengths, np.array([90, 330]))
    else:
        given["lengths"] = lengths
    whole = attend(q, k, v, **given)
    pages, table = in_pages(k, page_size)
    assert np.isfinite(whole).all()
    assert same(attend(q, pages, in_pages(v, page_size)[0], block_table=table, **given), whole)


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
