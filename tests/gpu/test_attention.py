"""The kernels on a real GPU: the contract of the emulator; skipped where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulator.cases import CASES, Case
from tests.support.attention_contract import bits
from tests.support.gpu_contract import GpuContract
from tests.support.records_contract import RecordsContract
from treeattn.attention.shape import bits_of
from treeattn.backends import cuda
from treeattn.backends.cuda import cupy_runtime

Array = np.ndarray[Any, Any]


def to_device(array: Array | None) -> Any:
    """A device array with the strides of `array` and what lies around it; types that CuPy lacks as their
    bits."""
    import cupy

    if array is None:
        return None
    array = root = np.asarray(array)
    while isinstance(root.base, np.ndarray):
        root = root.base
    memory = cupy.asarray(root.ravel(order="K").view(np.uint8)).data + (array.ctypes.data - root.ctypes.data)
    return cupy.ndarray(array.shape, bits_of(array.dtype.name) or array.dtype, memory, array.strides)


class OnTheGpu:
    """Where arrays lie."""

    backend = cuda

    def put(self, array: Array | None) -> Any:
        return to_device(array)

    def get(self, array: Any) -> Array:
        return array if isinstance(array, np.ndarray) else array.get()


class TestRecordsOnTheGpu(OnTheGpu, RecordsContract):
    pass


class TestOnTheGpu(OnTheGpu, GpuContract):
    cases, gate = CASES, 12

    def runtime(self, seed: int = 0) -> Any:
        return cupy_runtime.current()

    def write(self, into: Any, values: Array) -> None:
        into.set(np.ascontiguousarray(values, into.dtype))


def device_inputs(case: Case) -> list[Any]:
    """q, k, v and lengths."""
    return TestOnTheGpu().arrays(case, case.inputs())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_launch_has_the_same_bits_each_time(case: Case) -> None:
    contract, arrays = TestOnTheGpu(), device_inputs(case)
    planned, records = contract.planned(case, case.inputs().visible)
    planned(*arrays)
    first = records.get()
    for _ in range(20):
        planned(*arrays)
    assert (bits(records.get()) == bits(first)).all()
