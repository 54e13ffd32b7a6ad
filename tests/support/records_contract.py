"""What is done with records has the bits that treeattn/partial.py defines: a subclass for each backend."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

from treeattn import partial
from treeattn.backends import cpu
from treeattn.backends.cpu.records import rescale_records
from treeattn.collectives.runtime.operator import Operator

Array = np.ndarray[Any, Any]
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
    return array.view(np.uint64 if array.itemsize == 8 else np.uint32)


def merged(first: Array, *others: Array) -> Array:
    """By the definition."""
    first = first.copy()
    for other in others:
        partial.merge(first, other)
    return first


class RecordsContract:
    """A subclass names the backend and where its arrays lie."""

    backend: Any
    head_dims: tuple[int, ...] = (64, 80, 256)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "head_dim" in metafunc.fixturenames:
            metafunc.parametrize("head_dim", self.head_dims)

    def pairs(self, head_dim: int) -> list[tuple[Array, Array]]:
        """Records to merge."""
        return [(random_records(200, head_dim, 0), random_records(200, head_dim, 1))]

    def place(self) -> dict[str, Any]:
        """The runtime of a plan, if it has one."""
        return {}

    def put(self, array: Array) -> Any:
        """A copy where the backend reads arrays."""
        return array.copy()

    def get(self, array: Any) -> Array:
        """As an array of NumPy."""
        return np.asarray(array)

    def operator(self, head_dim: int) -> Any:
        return self.backend.MergeOperator(head_dim, **self.place())

    def test_merge_has_the_defined_bits_and_is_commutative(self, head_dim: int) -> None:
        operator: Operator = self.operator(head_dim)
        assert (operator.width, operator.dtype) == (head_dim + 2, np.float32)
        for pair in self.pairs(head_dim):
            for into, other in (pair, pair[::-1]):
                held = self.put(into)
                operator.planned_merge(held, self.put(other))()
                assert (bits(self.get(held)) == bits(merged(*pair))).all()
                operator.planned_merge(held[:0], held[:0])()  # a chunk may be empty

    @pytest.mark.parametrize("written", ["in place", "packed", "apart"])
    def test_sums_of_rescaled_records_are_the_merge(self, head_dim: int, written: str) -> None:
        """Up to a rounding, which a merge makes once, at the sum: here products are rounded before."""
        operator = self.operator(head_dim)
        pair = [random_records(200, head_dim, seed) for seed in (0, 1)]
        tops = []
        for records in pair:
            maxima = self.put(np.full(200, 77, np.float32))
            operator.planned_maxima(self.put(records), maxima)()
            tops.append(self.get(maxima))
            np.testing.assert_array_equal(tops[-1], np.where(np.isnan(records[:, 0]), np.inf, records[:, 0]))
        shared, scaled = np.maximum(*tops), []
        for records in pair:
            held, expected = self.put(records), np.empty((200, head_dim + 1), np.float32)
            sums = held[:, 1:] if written == "in place" else self.put(expected)
            places = [sums[:, 0], sums[:, 1:]]
            if written == "apart":
                places = [self.put(expected[:, 0]), self.put(expected[:, 1:])]
            operator.planned_rescale(held, self.put(shared), *places)()
            scaled.append(np.column_stack([self.get(place) for place in places]))
            rescale_records(records, shared, expected[:, 0], expected[:, 1:])
            np.testing.assert_array_equal(scaled[-1], expected)
            assert (scaled[-1][records[:, 0] == -np.inf] == 0).all()
        wanted = merged(*pair)
        with np.errstate(all="ignore"):
            total, near = scaled[0] + scaled[1], 2e-7 * (np.abs(scaled[0]) + np.abs(scaled[1]))
            same = (total == wanted[:, 1:]) | (np.abs(total - wanted[:, 1:]) <= near)
        np.testing.assert_array_equal(np.isnan(total), np.isnan(wanted[:, 1:]))
        assert (same | np.isnan(total)).all()
        assert (total[wanted[:, 0] == -np.inf] == 0).all()

    def test_finish_has_the_defined_bits(self) -> None:
        for pair in self.pairs(64):
            for records in (pair[0], merged(*pair)):
                records = records[:200].reshape(2, 10, 10, 66)
                wanted = [np.full(shape, 77, np.float32) for shape in ((2, 10, 10, 64), (2, 10, 10))]
                found = [self.put(array) for array in wanted]
                partial.finish(records, *wanted)
                self.backend.planned_finish(self.put(records), *found, **self.place())()
                for array, right in zip(found, wanted, strict=True):
                    assert (bits(self.get(array)) == bits(right)).all()

    def test_a_planned_call_keeps_its_arrays(self) -> None:
        operator = self.operator(64)
        arrays = [self.put(np.zeros((3, 66), np.float32)) for _ in range(2)]
        arrays.append(self.put(np.zeros(3, np.float32)))
        alive = [weakref.ref(array) for array in arrays]
        rescale = operator.planned_rescale(arrays[0], arrays[2], *operator.columns(arrays[0])[1:])
        calls = [operator.planned_merge(*arrays[:2]), rescale]
        del rescale
        arrays.clear()
        assert [array for array in alive if array() is None] == []
        calls.clear()
        assert [array for array in alive if array() is not None] == []

    @pytest.mark.parametrize("count", [0, 1, 128, 300])
    def test_a_scaled_lse_is_that_of_the_processor(self, count: int) -> None:
        wanted = (np.random.default_rng(0).standard_normal(count) * 50).astype(np.float32)
        wanted[: len(SPECIAL)] = SPECIAL[:count]
        found = self.put(wanted)
        cpu.planned_scale(wanted, 1 / np.log(2))()
        self.backend.planned_scale(found, 1 / np.log(2), **self.place())()
        np.testing.assert_array_equal(self.get(found), wanted)
