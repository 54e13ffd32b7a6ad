"""Merge and finish on the emulator: the bits that treeattn/partial.py defines, as on every processor."""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support import verbs
from tests.support.drawn import sample
from treeattn import partial
from treeattn.backends import cpu, cuda
from treeattn.collectives.runtime.operator import Operator
from treeattn.errors import ArgumentError

from .raw_module import compiler_problem
from .runtime import EmulatorRuntime

Array = np.ndarray[Any, Any]
pytestmark = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))

SPECIAL = (-np.inf, np.inf, np.nan, 0.0, -0.0, 1e-42, -3e-45, 1e4, -1e4, 87.1, 3.0)


def random_records(count: int, head_dim: int, seed: int) -> Array:
    """Records of every kind: all pairs of special maxima meet when two seeds are merged."""
    rng = np.random.default_rng(seed)
    records = (rng.standard_normal((count, head_dim + 2)) * 8).astype(np.float32)
    records[:, 1] = np.abs(records[:, 1]) + 0.5
    n = len(SPECIAL)
    for i in range(n * n):
        records[i, 0] = SPECIAL[i % n if seed % 2 else i // n]
        records[i, 1] = SPECIAL[i % n] if i % 7 == 0 else records[i, 1]
    records[n * n : n * n + 20] *= np.float32(1e-41)  # subnormal
    records[n * n + 20 : n * n + 60, 0] *= 10
    records[::5][records[::5, 0] == -np.inf, 1:] = np.nan  # left over: such a record is the identity
    return records


def bits(array: Array) -> Array:
    return array.view(np.uint32)


@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_merge_has_the_defined_bits_and_is_commutative(head_dim: int) -> None:
    runtime = EmulatorRuntime(seed=2)
    first, second = (random_records(200, head_dim, seed) for seed in (0, 1))
    want, got, turned = first.copy(), first.copy(), second.copy()
    partial.merge(want, second)
    verbs.merge(cuda, got, second, runtime=runtime)
    verbs.merge(cuda, turned, first, runtime=runtime)
    assert (bits(got) == bits(want)).all()
    assert (bits(turned) == bits(want)).all()


def test_merge_of_many_folds_in_the_given_order() -> None:
    runtime = EmulatorRuntime()
    operator = cuda.MergeOperator(64, runtime=runtime)
    into, *others = (random_records(150, 64, seed) for seed in range(6))
    want = into.copy()
    for other in others:
        partial.merge(want, other)
    operator.planned_merge_many(into, np.stack(others))()
    assert (bits(into) == bits(want)).all()
    assert runtime.launches == 1


def test_operator_is_what_executors_ask_for() -> None:
    operator: Operator = cuda.MergeOperator(64, runtime=EmulatorRuntime())
    assert operator.width == 66
    assert operator.dtype == np.float32
    into, other = random_records(200, 64, 0), random_records(200, 64, 1)
    want = into.copy()
    partial.merge(want, other)
    operator.planned_merge(into, other)()
    assert (bits(into) == bits(want)).all()
    operator.planned_merge(into[:0], other[:0])()  # a chunk may be empty


def taken(operator: cuda.MergeOperator, records: Array) -> Array:
    """Their maxima, as a library gets them."""
    maxima = np.full(len(records), 77, np.float32)
    operator.planned_maxima(records, maxima)()
    np.testing.assert_array_equal(maxima, np.where(np.isnan(records[:, 0]), np.inf, records[:, 0]))
    return maxima


def rescaled(operator: cuda.MergeOperator, records: Array, maxima: Array, in_place: bool) -> Array:
    """Denominators and numerators, [records, head_dim + 1]: where they lie, or in arrays of their own."""
    sums = records[:, 1:] if in_place else np.full(records[:, 1:].shape, 77, np.float32)
    operator.planned_rescale(records, maxima, sums[:, 0], sums[:, 1:])()
    return sums


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_sums_of_rescaled_records_are_the_merge(head_dim: int, in_place: bool) -> None:
    """What rescaled records add up to is their merge, up to a rounding."""
    runtime = EmulatorRuntime(seed=1)
    operator = cuda.MergeOperator(head_dim, runtime=runtime)
    first, second = (random_records(200, head_dim, seed) for seed in (0, 1))
    want = first.copy()
    partial.merge(want, second)
    maxima = np.maximum(*(taken(operator, records) for records in (first, second)))
    empty = want[:, 0] == -np.inf
    tops = first[:, 0].copy(), second[:, 0].copy()
    first, second = (rescaled(operator, records, maxima, in_place) for records in (first, second))
    for records, top in zip((first, second), tops, strict=True):
        assert (records[top == -np.inf] == 0).all()
    want = want[:, 1:]
    with np.errstate(all="ignore"):
        total = first + second
    np.testing.assert_array_equal(np.isnan(total), np.isnan(want))
    same = (total == want) | np.isnan(want)
    with np.errstate(all="ignore"):  # a merge rounds once, at the sum: here the product is rounded before
        assert (same | (np.abs(total - want) <= 2e-7 * (np.abs(first) + np.abs(second)))).all()
    assert (total[empty] == 0).all()


def test_finish_has_the_defined_bits() -> None:
    batch, heads, queries, head_dim = 2, 10, 10, 64
    records = random_records(200, head_dim, 3).reshape(batch, heads, queries, head_dim + 2)
    shapes = (batch, queries, heads, head_dim), (batch, heads, queries)
    want, got = ([np.full(shape, 77, np.float32) for shape in shapes] for _ in range(2))
    partial.finish(records, *want)
    verbs.finish(cuda, records, *got, runtime=EmulatorRuntime())
    assert (bits(got[0]) == bits(want[0])).all()
    assert (bits(got[1]) == bits(want[1])).all()


def test_a_planned_launch_keeps_its_arrays() -> None:
    """Its argument structure holds addresses only."""
    runtime = EmulatorRuntime()
    operator = cuda.MergeOperator(64, runtime=runtime)
    arrays = [np.zeros((3, 66), np.float32) for _ in range(2)]
    arrays.append(np.zeros(3, np.float32))
    alive = [weakref.ref(array) for array in arrays]
    rescale = operator.planned_rescale(arrays[0], arrays[2], *operator.columns(arrays[0])[1:])
    launches = [operator.planned_merge(*arrays[:2]), rescale]
    del rescale
    arrays.clear()
    assert [array for array in alive if array() is None] == []
    launches.clear()
    assert [array for array in alive if array() is not None] == []


def test_what_cannot_merge_is_refused() -> None:
    runtime = EmulatorRuntime()
    records = np.zeros((3, 66), np.float32)
    with pytest.raises(ArgumentError, match="cannot merge"):
        verbs.merge(cuda, records, records[:2].copy(), runtime=runtime)
    with pytest.raises(ArgumentError, match="C-contiguous float32"):
        verbs.merge(cuda, records, records.astype(np.float64), runtime=runtime)
    with pytest.raises(ArgumentError, match="device='cpu'"):
        cuda.MergeOperator(64, np.float64, runtime=runtime)
    operator = cuda.MergeOperator(64, runtime=runtime)
    with pytest.raises(ArgumentError, match="maxima must be"):
        operator.planned_rescale(records, np.zeros(2, np.float32), *operator.columns(records)[1:])
    with pytest.raises(ArgumentError, match="out must be"):
        verbs.finish(
            cuda,
            np.zeros((1, 1, 1, 66), np.float32),
            np.zeros((1, 1, 1, 65), np.float32),
            np.zeros((1, 1, 1), np.float32),
            runtime=runtime,
        )


@pytest.mark.parametrize(
    ("dtype", "head_dim", "factor"),
    sample(
        6,
        itertools.product([np.float32, np.float16, ml_dtypes.bfloat16], [5, 72, 300], [1.0, math.log(2)]),
    ),
)
def test_parts_of_other_kernels_become_the_records_that_the_processor_makes(
    dtype: Any, head_dim: int, factor: float
) -> None:
    runtime = EmulatorRuntime(seed=1)
    rng = np.random.default_rng(0)
    out = rng.standard_normal((4, len(SPECIAL), head_dim)).astype(dtype)
    lse = np.array([SPECIAL] * 4, np.float32)
    out[0], out[1, 3, 1] = np.nan, np.nan
    want, got = np.full((2, 4, len(SPECIAL), head_dim + 2), 9, np.float32)
    cpu.planned_pack(want, factor)(out, lse)
    pack = cuda.planned_pack(got, factor, runtime=runtime)
    pack(out, lse)
    assert (bits(got) == bits(want)).all()
    assert runtime.launches == 1
    if dtype == ml_dtypes.bfloat16:
        got[...] = 9
        pack(out.view(np.uint16), lse)
        assert (bits(got) == bits(want)).all()


def test_strided_parts_are_copied_on_the_device_into_room_that_is_kept() -> None:
    runtime = EmulatorRuntime()
    out = np.random.default_rng(0).standard_normal((3, 4, 16)).astype(ml_dtypes.bfloat16).swapaxes(0, 1)
    lse = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32).T
    want, got = np.empty((2, 4, 3, 18), np.float32)
    cpu.planned_pack(want, 1.0)(out, lse)
    pack = cuda.planned_pack(got, 1.0, runtime=runtime)
    for _ in range(2):
        pack(out, lse)
        assert runtime.allocations == 2
    assert (bits(got) == bits(want)).all()


@pytest.mark.parametrize("count", [0, 1, 128, 300])
def test_a_scaled_lse_has_the_bits_of_the_processor(count: int) -> None:
    want = (np.random.default_rng(0).standard_normal(count) * 50).astype(np.float32)
    want[: len(SPECIAL)] = SPECIAL[:count]
    got = want.copy()
    cpu.planned_scale(want, 1 / math.log(2))()
    cuda.planned_scale(got, 1 / math.log(2), runtime=EmulatorRuntime())()
    np.testing.assert_array_equal(got, want)


def test_parts_that_the_gpu_has_no_kernel_for() -> None:
    runtime = EmulatorRuntime()
    with pytest.raises(ArgumentError, match="records on the GPU are float32, not float64: use device='cpu'"):
        cuda.planned_pack(np.empty((2, 10)), 1.0, runtime=runtime)
    pack = cuda.planned_pack(np.empty((2, 10), np.float32), 1.0, runtime=runtime)
    with pytest.raises(ArgumentError, match="lse float64: on the GPU"):
        pack(np.empty((2, 8), np.float32), np.empty(2))
