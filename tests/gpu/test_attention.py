"""The kernels on a real GPU: the contract of the emulator; skipped where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulator.cases import CASES, Case
from tests.emulator.test_records import bits, random_records
from tests.support import verbs
from tests.support.gpu_contract import GpuContract
from treeattn import partial
from treeattn.attention.shape import bits_of
from treeattn.backends import cuda
from treeattn.backends.cuda import cupy_runtime

_PROBLEM = cupy_runtime.problem()
pytestmark = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))

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


class TestOnTheGpu(GpuContract):
    cases, gate = CASES, 12

    def runtime(self, seed: int = 0) -> Any:
        return cupy_runtime.current()

    def put(self, array: Array | None) -> Any:
        return to_device(array)

    def get(self, array: Any) -> Array:
        return array if isinstance(array, np.ndarray) else array.get()

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


def test_merge_and_finish_have_the_defined_bits() -> None:
    import cupy

    first, second = random_records(200, 64, 0), random_records(200, 64, 1)
    want = first.copy()
    partial.merge(want, second)
    got = cupy.asarray(first)
    verbs.merge(cuda, got, cupy.asarray(second))
    assert (bits(got.get()) == bits(want)).all()
    shapes = (2, 10, 10, 64), (2, 10, 10)
    outputs = [np.empty(shape, np.float32) for shape in shapes]
    on_device = [cupy.empty(shape, cupy.float32) for shape in shapes]
    partial.finish(want.reshape(2, 10, 10, 66), *outputs)
    verbs.finish(cuda, got.reshape(2, 10, 10, 66), *on_device)
    for wanted, array in zip(outputs, on_device, strict=True):
        assert (bits(array.get()) == bits(wanted)).all()
