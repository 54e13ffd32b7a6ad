"""Records of bfloat16 under way: what rounding costs, and that the merge stays commutative to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from treeattn import collectives, partial
from treeattn.collectives.executors import loopback
from treeattn.study.compare.steps import Bfloat16Operator, narrow, widen

HEAD_DIM = 64


def random_records(count, seed, spread=20.0):
    draw = np.random.default_rng(seed)
    records = draw.standard_normal((count, HEAD_DIM + 2)).astype(np.float32)
    records[:, 0] *= spread
    records[:, 1] = draw.uniform(1, 100, count)
    return records


def on_wire(records):
    wire = np.zeros(records.shape, np.uint16)
    narrow(records, wire)
    return wire


def finished(records):
    shape = (1, len(records), 1, HEAD_DIM + 2)
    out, lse = (
        np.empty((1, 1, len(records), HEAD_DIM), np.float32),
        np.empty((1, len(records), 1), np.float32),
    )
    partial.finish(records.reshape(shape), out, lse)
    return out, lse


@pytest.mark.parametrize("spread", [1.0, 50.0, 1e4])
def test_error_of_one_rounding_does_not_grow_with_the_logit(spread):
    records = random_records(200, 0, spread)
    back = np.empty_like(records)
    widen(on_wire(records), back)
    out, lse = finished(records)
    rounded_out, rounded_lse = finished(back)
    scale = np.abs(out).max(axis=-1, keepdims=True)
    assert (np.abs(rounded_out - out) <= 2**-7 * scale).all()  # d and n are off by 2^-9 each, and n by max|n|
    assert (np.abs(rounded_lse - lse) <= 2**-8 + 1e-6 * np.abs(lse)).all()


def test_empty_records_stay_empty():
    records = random_records(3, 1)
    partial.set_identity(records[1:2])
    back = np.empty_like(records)
    widen(on_wire(records), back)
    np.testing.assert_array_equal(back[1], records[1])
    assert np.isfinite(back[[0, 2]]).all()


def test_merge_is_commutative_to_the_bit():
    operator = Bfloat16Operator(HEAD_DIM)
    a, b = (on_wire(random_records(300, seed)) for seed in (2, 3))
    left, right = a.copy(), b.copy()
    operator.planned_merge(left, b)()
    operator.planned_merge(right, a)()
    np.testing.assert_array_equal(left, right)
    assert (left != a).any()


@pytest.mark.parametrize("scheme", ["binary_tree", "recursive_doubling", "ring", "all_gather_merge"])
def test_any_schedule_takes_it(scheme):
    values = [random_records(8, seed, 3.0) for seed in range(5)]
    results = loopback.run(
        collectives.build(scheme, 5), [on_wire(v) for v in values], Bfloat16Operator(HEAD_DIM)
    )
    total = values[0].astype(np.float64)
    for value in values[1:]:
        partial.merge(total, value.astype(np.float64))
    for result in results:
        np.testing.assert_array_equal(result, results[0])
        back = np.empty((8, HEAD_DIM + 2), np.float32)
        widen(result, back)
        exact = total[:, 2:] / total[:, 1:2]
        assert np.abs(back[:, 2:] / back[:, 1:2] - exact).max() < 5 * 2**-8 * np.abs(exact).max()
