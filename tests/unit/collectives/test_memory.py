"""Memory of the host: arrays as NumPy's, and large ones on large pages."""

import ml_dtypes
import numpy as np
import pytest

from treeattn.collectives.runtime.memory import HOST


@pytest.mark.parametrize("size", [0, 3, (1 << 20) - 2, 1 << 20, (2 << 20) + 6, 5 << 20])
@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.bfloat16], ids=str)
def test_an_array_is_new_and_a_large_one_begins_a_page(size, dtype):
    shape = (2, size // 2 // np.dtype(dtype).itemsize, 1)
    array, other = HOST.large(shape, dtype), HOST.large(shape, dtype)
    assert (array.shape, array.dtype, array.flags.c_contiguous) == (shape, dtype, True)
    assert array.nbytes < 1 << 20 or array.ctypes.data % (2 << 20) == 0
    array.fill(1)
    other.fill(2)
    assert (array == 1).all()
