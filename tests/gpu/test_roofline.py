"""The GPU roofline on a GPU: numbers that fit together; no timing decides. Skipped where there is none."""

from __future__ import annotations

import pytest

from treeattn.backends.cuda import cupy_runtime
from treeattn.study.roofline import cuda as roofline_cuda

_PROBLEM = cupy_runtime.problem()
pytestmark = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))


def test_rows_fit_together() -> None:
    result = roofline_cuda.measure(1024, ["bfloat16", "float32"], [1, 4], repeats=3)
    assert [(row["dtype"], row["group"]) for row in result["rows"]] == [
        ("bfloat16", 1), ("bfloat16", 4), ("float32", 1), ("float32", 4),
    ]  # fmt: skip
    for row in result["rows"]:
        size = {"bfloat16": 2, "float32": 4}[row["dtype"]] * 2 * 1024 * 8 * 128
        assert row["gb_s"] == pytest.approx(size / row["microseconds"] / 1e3)
        assert row["percent_of_copy_rate"] == pytest.approx(100 * row["gb_s"] / row["copy_rate_gb_s"])
        assert (row["caches"] - 1) * size >= 2 * result["device"]["l2_bytes"]
    assert result["device"]["name"]
