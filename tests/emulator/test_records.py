"""What is done with records on the emulator, and what no other backend has of it."""

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support import verbs
from tests.support.drawn import sample
from tests.support.records_contract import SPECIAL, RecordsContract, bits, merged, random_records
from treeattn.backends import cpu, cuda
from treeattn.errors import ArgumentError

from .runtime import EmulatorRuntime


class TestOnTheEmulator(RecordsContract):
    backend = cuda

    def place(self) -> dict[str, Any]:
        return {"runtime": EmulatorRuntime(seed=2)}


def test_merge_of_many_folds_in_the_given_order() -> None:
    runtime = EmulatorRuntime()
    operator = cuda.MergeOperator(64, runtime=runtime)
    into, *others = (random_records(150, 64, seed) for seed in range(6))
    want = merged(into, *others)
    operator.planned_merge_many(into, np.stack(others))()
    assert (bits(into) == bits(want)).all()
    assert runtime.launches == 1


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


def test_parts_that_the_gpu_has_no_kernel_for() -> None:
    runtime = EmulatorRuntime()
    with pytest.raises(ArgumentError, match="records on the GPU are float32, not float64: use device='cpu'"):
        cuda.planned_pack(np.empty((2, 10)), 1.0, runtime=runtime)
    pack = cuda.planned_pack(np.empty((2, 10), np.float32), 1.0, runtime=runtime)
    with pytest.raises(ArgumentError, match="lse float64: on the GPU"):
        pack(np.empty((2, 8), np.float32), np.empty(2))
