"""The product of decoding against NumPy, and its bits: the same for any number of vectors and threads."""

from __future__ import annotations

import numpy as np
import pytest

from treeattn.backends.cpu import PlannedProduct, compile, compiled_kernels_problem
from treeattn.backends.cpu import multiply_rows as module

pytestmark = pytest.mark.skipif(compiled_kernels_problem() is not None, reason="no C compiler")


@pytest.mark.parametrize("isa", compile.available_isas())
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 33, 200])
@pytest.mark.parametrize("columns", [0, 1, 7, 16, 31, 576])
def test_a_product_is_numpys(monkeypatch, isa, rows, columns):
    monkeypatch.setenv("TREEATTN_ISA", isa)
    rng = np.random.default_rng(rows * 1000 + columns)
    matrix = rng.standard_normal((rows, columns), np.float32)
    vectors = rng.standard_normal((module.MOST, columns), np.float32)
    wanted = vectors.astype(np.float64) @ matrix.T.astype(np.float64)
    product = PlannedProduct(matrix)
    bound = 1e-6 * (np.abs(vectors).astype(np.float64) @ np.abs(matrix.T)) + 1e-30
    for count in range(module.MOST + 1):
        got = product(vectors[:count])
        assert got.shape == (count, rows)
        assert (np.abs(got - wanted[:count]) <= bound[:count]).all()


def test_bits_do_not_depend_on_company_or_threads(monkeypatch):
    rng = np.random.default_rng(5)
    matrix, vectors = rng.standard_normal((1000, 333), np.float32), rng.standard_normal((13, 333), np.float32)
    alone = np.concatenate([PlannedProduct(matrix)(one[None]) for one in vectors])
    for threads in ("1", "3"):
        monkeypatch.setenv("TREEATTN_THREADS", threads)
        product = PlannedProduct(matrix)
        for begin in range(0, 13, 5):
            assert np.array_equal(product(vectors[begin : begin + 5]), alone[begin : begin + 5])


def test_what_the_kernel_does_not_take_is_numpys():
    rng = np.random.default_rng(6)
    matrix, vectors = rng.standard_normal((8, 20), np.float32).T, rng.standard_normal((40, 8), np.float32)
    assert np.array_equal(PlannedProduct(matrix)(vectors[:2]), vectors[:2] @ matrix.T)
    held = np.ascontiguousarray(matrix)
    assert np.array_equal(PlannedProduct(held)(vectors), vectors @ held.T)
    assert np.allclose(PlannedProduct(held)(vectors[::20]), vectors[::20] @ held.T)


def test_vectors_of_another_length_are_refused():
    with pytest.raises(ValueError, match="mismatch"):
        PlannedProduct(np.ones((3, 5), np.float32))(np.ones((1, 4), np.float32))


def test_without_a_compiler_it_is_numpys(monkeypatch):
    monkeypatch.setattr(compile, "loaded", lambda: (None, "none"))
    matrix, vector = np.ones((3, 5), np.float32), np.arange(5, dtype=np.float32)[None]
    assert PlannedProduct(matrix)(vector).tolist() == [[10.0] * 3]
