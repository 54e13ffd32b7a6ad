"""The kernels on a GPU, through the same table of cases as the emulator; skipped where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulator import test_cache
from tests.emulator.cases import CASES, Case, is_tensor_core_case
from tests.emulator.test_records import bits, random_records
from tests.support import verbs
from tests.support.pages import in_pages
from treeattn import partial
from treeattn.backends import cuda
from treeattn.backends.cuda import cupy_runtime
from treeattn.backends.cuda.variants import TYPES_8

_PROBLEM = cupy_runtime.problem()
pytestmark = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))

Array = np.ndarray[Any, Any]


def to_device(array: Array | None) -> Any:
    """A device array with the strides of `array`; bfloat16 as its bits."""
    import cupy

    if array is None:
        return None
    if array.dtype.name == "bfloat16":
        array = array.view(np.uint16)
    order = np.argsort([-stride for stride in array.strides], kind="stable")
    return cupy.asarray(np.ascontiguousarray(array.transpose(order))).transpose(np.argsort(order))


def device_inputs(case: Case) -> list[Any]:
    q, k, v, lengths, visible = case.inputs()
    if case.v_dim:  # the values are channels of the keys, in their memory
        keys = to_device(k) if case.layout != "gaps" else to_device(k.base)[x_view(k)]
        return [to_device(q), keys, keys[..., : case.v_dim], to_device(lengths), visible]
    if case.layout != "gaps":
        return [*(to_device(array) for array in (q, k, v, lengths)), visible]
    return [to_device(q), *(to_device(x.base)[x_view(x)] for x in (k, v)), to_device(lengths), visible]


def x_view(view: Array) -> tuple[slice, ...]:
    """Where `Case` puts the rows of the layout "gaps"."""
    _, tokens, heads, head_dim = view.shape
    return (slice(None), slice(1, tokens + 1), slice(heads), slice(head_dim))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu_is_exact(case: Case) -> None:
    import cupy

    q, k, v, lengths, visible = device_inputs(case)
    records = cupy.full((case.batch, case.heads, case.queries, case.width + 2), 77, cupy.float32)
    planned = cuda.PlannedAttention(
        *(records,),
        scale=case.scale,
        tables=visible,
        num_splits=case.splits,
        tensor_cores=case.tensor_cores,
    )
    planned(q, k, v, lengths)
    first = records.get()
    out = cupy.full((case.batch, case.queries, case.heads, case.width), 77, cupy.float32)
    lse = cupy.full((case.batch, case.heads, case.queries), 77, cupy.float32)
    verbs.finish(cuda, records, out, lse)
    case.check(out.get(), lse.get(), is_tensor_core_case(case) and cupy_runtime.current().tensor_cores)
    for _ in range(20):
        planned(q, k, v, lengths)
    assert (bits(records.get()) == bits(first)).all()


@pytest.mark.parametrize("kind", TYPES_8)
def test_pages_of_8_bits_are_read(kind: str) -> None:
    """As the emulator reads them, but for the last bits of 2^x."""
    import cupy

    q, k, v = test_cache.arrays(kind, 128, 4, q_kind=np.float16)
    (pages, table), (values, _) = in_pages(k, 16), in_pages(v, 16)
    records = cupy.zeros((2, 8, 1, 130), cupy.float32)
    given = {"scale": 0.1, "k_scale": [0.5, 2.0], "v_scale": 3.0, "kv_dtype": kind, "num_splits": 3}
    verbs.attend(
        cuda,
        *(to_device(q), to_device(pages.view(np.uint8)), to_device(values.view(np.uint8)), records),
        lengths=to_device(np.array([150, 111], np.int64)),
        block_table=to_device(table),
        **given,
    )
    wanted = test_cache.attend(
        *(q, pages, values), lengths=np.array([150, 111], np.int64), block_table=table, **given
    )
    np.testing.assert_allclose(records.get(), wanted, rtol=1e-5, atol=1e-5)


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
