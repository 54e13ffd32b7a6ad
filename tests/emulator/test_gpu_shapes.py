"""The benchmark of rare shapes, every one of them on the emulator over a few tokens."""

from __future__ import annotations

import gpu_shapes
import pytest

from .raw_module import compiler_problem
from .stopwatch import EmulatorStopwatch

pytestmark = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))


@pytest.mark.deep
def test_every_shape_has_its_row() -> None:
    rows = list(gpu_shapes.measure(EmulatorStopwatch(20_000), 128, 1))
    assert [row["what"] for row in rows] == [shape.what for shape in gpu_shapes.SHAPES]
    for row in rows:
        assert "problem" not in row, row
        assert row["microseconds"] == pytest.approx(5)
        assert row["percent_of_copy_rate"] == pytest.approx(20 * row["floor_microseconds"])
