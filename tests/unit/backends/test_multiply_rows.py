"""The product of decoding against NumPy, and its bits: the same for any number of vectors and threads."""

import ml_dtypes
import numpy as np
import pytest

from treeattn.backends.cpu import PlannedProduct, compile, compiled_kernels_problem
from treeattn.backends.cpu import multiply_rows as module

pytestmark = pytest.mark.skipif(compiled_kernels_problem() is not None, reason="no C compiler")


TYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def drawn(rng, rows, columns, dtype):
    """A matrix that begins anywhere in memory."""
    spare = int(rng.integers(32))
    flat = rng.standard_normal(rows * columns + spare, np.float32)
    return flat.astype(dtype)[spare:].reshape(rows, columns)


@pytest.mark.parametrize("isa", compile.available_isas())
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("columns", [0, 1, 7, 16, 31, 32, 65, 576])
def test_a_product_is_numpys(monkeypatch, isa, dtype, columns):
    monkeypatch.setenv("TREEATTN_ISA", isa)
    rng = np.random.default_rng(columns)
    matrices = [
        drawn(rng, rows, columns, dtype) for rows in rng.permutation([0, 1, 16, 33, int(rng.integers(300))])
    ]
    vectors = rng.standard_normal((module.MOST + 3, columns), np.float32)
    matrix = np.concatenate([one[:] for one in matrices]).astype(np.float64)
    wanted, rows = vectors.astype(np.float64) @ matrix.T, len(matrix)
    product = PlannedProduct(matrices)
    bound = 1e-6 * (np.abs(vectors).astype(np.float64) @ np.abs(matrix.T)) + 1e-30
    for count in range(len(vectors) + 1):
        got = product(vectors[:count])
        assert got.shape == (count, rows)
        assert (np.abs(got - wanted[:count]) <= bound[:count]).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_bits_do_not_depend_on_company_or_threads(monkeypatch, dtype):
    """Nor on whether one call is of several matrices."""
    rng = np.random.default_rng(5)
    matrix, vectors = drawn(rng, 1000, 333, dtype), rng.standard_normal((13, 333), np.float32)
    parts = np.split(matrix, [7, 500])
    alone = np.concatenate(
        [np.concatenate([PlannedProduct([part])(one[None]) for part in parts], 1) for one in vectors]
    )
    for threads in ("1", "3"):
        monkeypatch.setenv("TREEATTN_THREADS", threads)
        product = PlannedProduct(parts if threads == "3" else [matrix])
        for begin in range(0, 13, 5):
            assert np.array_equal(product(vectors[begin : begin + 5]), alone[begin : begin + 5])


def test_what_the_kernel_does_not_take_is_numpys():
    rng = np.random.default_rng(6)
    matrix, vectors = rng.standard_normal((8, 20), np.float32).T, rng.standard_normal((40, 8), np.float32)
    assert np.array_equal(PlannedProduct([matrix])(vectors[:2]), vectors[:2] @ matrix.T)
    held = np.ascontiguousarray(matrix)
    assert np.array_equal(PlannedProduct([held])(vectors), vectors @ held.T)
    assert np.allclose(PlannedProduct([held])(vectors[::20]), vectors[::20] @ held.T, atol=1e-6)


def test_numpy_widens_some_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "_WIDENED", 100)
    rng = np.random.default_rng(7)
    matrices = [drawn(rng, 40, 9, dtype) for dtype in TYPES]
    vectors, whole = rng.standard_normal((30, 9), np.float32), [one.astype(np.float32) for one in matrices]
    for count in (2, 30):
        assert np.allclose(
            PlannedProduct(matrices)(vectors[:count]), vectors[:count] @ np.concatenate(whole).T, atol=1e-5
        )


@pytest.mark.parametrize("isa", compile.available_isas())
@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_every_number_of_16_bits_is_widened(monkeypatch, isa, dtype):
    """Subnormal ones, infinities and NaN included, wherever in a row they are."""
    monkeypatch.setenv("TREEATTN_ISA", isa)
    numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    for columns in (1, 32, 45):
        matrix = np.zeros((1 << 16, columns), dtype)
        matrix[np.arange(1 << 16), np.arange(1 << 16) % columns] = numbers
        got = PlannedProduct([matrix])(np.ones((1, columns), np.float32))[0]
        np.testing.assert_array_equal(got, numbers.astype(np.float32))


def test_vectors_of_another_length_are_refused():
    with pytest.raises(ValueError, match="mismatch"):
        PlannedProduct([np.ones((3, 5), np.float32)])(np.ones((1, 4), np.float32))


def test_without_a_compiler_it_is_numpys(monkeypatch):
    monkeypatch.setattr(compile, "loaded", lambda: (None, "none"))
    matrix, vector = np.ones((3, 5), np.float32), np.arange(5, dtype=np.float32)[None]
    assert PlannedProduct([matrix])(vector).tolist() == [[10.0] * 3]
