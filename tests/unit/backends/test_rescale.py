"""Rescaling to a shared maximum: the compiled form, NumPy's, and what both mean."""

import numpy as np
import pytest

from treeattn.backends import cpu
from treeattn.backends.cpu import compile
from treeattn.backends.cpu.records import rescale_records

HEAD_DIM = 24
NAN, INF = float("nan"), float("inf")
# (own maximum, shared maximum): ordinary, equal, far apart, nothing seen here or anywhere, not a number
CASES = [(1.5, 2.25), (3.0, 3.0), (-1e4, 1e4), (-INF, 1.0), (-INF, -INF), (NAN, 1.0), (NAN, -INF), (INF, INF),
         (0.0, -0.0), (-86.9, 0.0), (-87.1, 0.0)]  # fmt: skip


def records(dtype):
    draw = np.random.default_rng(1)
    made = draw.standard_normal((len(CASES), HEAD_DIM + 2)).astype(dtype)
    made[:, 0] = [own for own, _ in CASES]
    made[3, 5] = NAN  # nothing seen counts for nothing, whatever it holds
    made[1, 7] = NAN
    return made, np.array([shared for _, shared in CASES], dtype)


def rescaled(run, made, shared, packed):
    sums = np.full((len(made), HEAD_DIM + 1), 7, made.dtype)
    apart = np.full(len(made), 7, made.dtype), np.full((len(made), HEAD_DIM), 7, made.dtype)
    denominators, numerators = (sums[:, 0], sums[:, 1:]) if packed else apart
    run(made, shared, denominators, numerators)
    return np.concatenate((denominators[:, None], numerators), axis=1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("isa", compile.available_isas())
def test_compiled_and_numpy_give_the_same_bits(monkeypatch, isa, packed):
    monkeypatch.setenv("TREEATTN_ISA", isa)
    if cpu.compiled_kernels_problem():
        pytest.skip("no C compiler")
    made, shared = records(np.float32)
    operator = cpu.MergeOperator(HEAD_DIM)
    compiled = rescaled(lambda *arrays: operator.planned_rescale(*arrays)(), made, shared, packed)
    plain = rescaled(rescale_records, made, shared, packed)
    np.testing.assert_array_equal(compiled, plain)


def test_float64_keeps_its_digits():
    made, shared = records(np.float64)
    found = rescaled(cpu.MergeOperator(HEAD_DIM, np.float64).planned_rescale, made, shared, True)
    assert (found == 7).all()  # it is planned, and not yet called
    found = rescaled(
        lambda *a: cpu.MergeOperator(HEAD_DIM, np.float64).planned_rescale(*a)(), made, shared, True
    )
    np.testing.assert_allclose(found[0], made[0, 1:] * np.exp(1.5 - 2.25), rtol=1e-15)
